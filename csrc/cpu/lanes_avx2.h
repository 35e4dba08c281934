// Stripes of 32 columns in AVX2 and F16C. Included into a namespace by row_loops_avx2.cc; see row_loops_impl.h for what
// a stripe must offer. bf16 is widened without shuffles: a vector of 16 values is read as 8 words whose low halves are
// the even columns and whose high halves are the odd ones.

struct Floats {
    using Scalar = float;
    __m256 v[4];
    MOECOMM_INLINE static Floats broadcast(float value) {
        const __m256 all = _mm256_set1_ps(value);
        return {{all, all, all, all}};
    }
};

struct Doubles {
    using Scalar = double;
    __m256d v[8];
    MOECOMM_INLINE static Doubles broadcast(double value) {
        const __m256d all = _mm256_set1_pd(value);
        return {{all, all, all, all, all, all, all, all}};
    }
};

MOECOMM_INLINE Floats add(Floats a, Floats b) {
    for (int i = 0; i < 4; ++i) a.v[i] = _mm256_add_ps(a.v[i], b.v[i]);
    return a;
}

MOECOMM_INLINE Floats multiply(Floats a, Floats b) {
    for (int i = 0; i < 4; ++i) a.v[i] = _mm256_mul_ps(a.v[i], b.v[i]);
    return a;
}

MOECOMM_INLINE Doubles add(Doubles a, Doubles b) {
    for (int i = 0; i < 8; ++i) a.v[i] = _mm256_add_pd(a.v[i], b.v[i]);
    return a;
}

MOECOMM_INLINE Doubles multiply(Doubles a, Doubles b) {
    for (int i = 0; i < 8; ++i) a.v[i] = _mm256_mul_pd(a.v[i], b.v[i]);
    return a;
}

MOECOMM_INLINE __m256i load_bits(const char* in) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)); }

MOECOMM_INLINE void store_bits(char* out, __m256i bits) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bits); }

MOECOMM_INLINE __m256 quiet(__m256 value) {
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kNanFloat)));
    return _mm256_blendv_ps(value, nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
}

struct StripeFp64 {
    using Wide = Doubles;
    static constexpr int kBytes = 8;
    static constexpr int kBlock = 1;

    MOECOMM_INLINE static Wide load(const char* in) {
        Wide r;
        for (int i = 0; i < 8; ++i) r.v[i] = _mm256_castsi256_pd(load_bits(in + 32 * i));
        return r;
    }
    MOECOMM_INLINE static void store(char* out, Wide value) {
        const __m256d nan = _mm256_castsi256_pd(_mm256_set1_epi64x(static_cast<int64_t>(kNanDouble)));
        for (int i = 0; i < 8; ++i) {
            const __m256d is_nan = _mm256_cmp_pd(value.v[i], value.v[i], _CMP_UNORD_Q);
            store_bits(out + 32 * i, _mm256_castpd_si256(_mm256_blendv_pd(value.v[i], nan, is_nan)));
        }
    }
    MOECOMM_INLINE static void spread(double* out, Wide value) {
        for (int i = 0; i < 8; ++i) _mm256_storeu_pd(out + 4 * i, value.v[i]);
    }
};

struct StripeFp32 {
    using Wide = Floats;
    static constexpr int kBytes = 4;
    static constexpr int kBlock = 2;

    MOECOMM_INLINE static Wide load(const char* in) {
        Wide r;
        for (int i = 0; i < 4; ++i) r.v[i] = _mm256_castsi256_ps(load_bits(in + 32 * i));
        return r;
    }
    MOECOMM_INLINE static void store(char* out, Wide value) {
        for (int i = 0; i < 4; ++i) store_bits(out + 32 * i, _mm256_castps_si256(quiet(value.v[i])));
    }
    MOECOMM_INLINE static void spread(float* out, Wide value) {
        for (int i = 0; i < 4; ++i) _mm256_storeu_ps(out + 8 * i, value.v[i]);
    }
};

struct StripeBf16 {
    using Wide = Floats;
    static constexpr int kBytes = 2;
    static constexpr int kBlock = 2;

    MOECOMM_INLINE static Wide load(const char* in) {
        const __m256i odd_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
        Wide r;
        for (int i = 0; i < 2; ++i) {
            const __m256i pairs = load_bits(in + 32 * i);
            r.v[2 * i] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
            r.v[2 * i + 1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, odd_half));
        }
        return r;
    }
    // The rounded value is in the upper half of each word; the lower half is rubbish.
    MOECOMM_INLINE static __m256i round(__m256 value) {
        const __m256i bits = _mm256_castps_si256(quiet(value));
        const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        return _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
    }
    MOECOMM_INLINE static void store(char* out, Wide value) {
        for (int i = 0; i < 2; ++i) {
            const __m256i even = _mm256_srli_epi32(round(value.v[2 * i]), 16);
            store_bits(out + 32 * i, _mm256_blend_epi16(even, round(value.v[2 * i + 1]), 0xaa));
        }
    }
    MOECOMM_INLINE static void spread(float* out, Wide value) {
        float quarters[4][8];
        for (int i = 0; i < 4; ++i) _mm256_storeu_ps(quarters[i], value.v[i]);
        for (int i = 0; i < 32; ++i) out[i] = quarters[i / 16 * 2 + i % 2][i % 16 / 2];
    }
};

struct StripeFp16 {
    using Wide = Floats;
    static constexpr int kBytes = 2;
    static constexpr int kBlock = 2;

    MOECOMM_INLINE static Wide load(const char* in) {
        Wide r;
        for (int i = 0; i < 4; ++i)
            r.v[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 16 * i)));
        return r;
    }
    MOECOMM_INLINE static __m128i round(__m256 value) {
        return _mm256_cvtps_ph(quiet(value), _MM_FROUND_TO_NEAREST_INT);
    }
    MOECOMM_INLINE static void store(char* out, Wide value) {
        store_bits(out, _mm256_set_m128i(round(value.v[1]), round(value.v[0])));
        store_bits(out + 32, _mm256_set_m128i(round(value.v[3]), round(value.v[2])));
    }
    MOECOMM_INLINE static void spread(float* out, Wide value) { StripeFp32::spread(out, value); }
};

// out is a multiple of 64, num_bytes a multiple of 64.
MOECOMM_INLINE void copy_lines(char* out, const char* in, size_t num_bytes) {
    for (const char* const end = in + num_bytes; in < end; in += 64, out += 64) {
        const __m256i a = load_bits(in), b = load_bits(in + 32);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(out), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(out + 32), b);
    }
}

MOECOMM_INLINE uint64_t read_lines(const char* in, size_t num_bytes) {
    __m256i a = _mm256_setzero_si256(), b = a;
    for (const char* const end = in + num_bytes; in < end; in += 64) {
        a = _mm256_xor_si256(a, load_bits(in));
        b = _mm256_xor_si256(b, load_bits(in + 32));
    }
    uint64_t words[4];
    store_bits(reinterpret_cast<char*>(words), _mm256_xor_si256(a, b));
    return words[0] ^ words[1] ^ words[2] ^ words[3];
}
