// Stripes of 32 columns in AVX-512 (F, BW, VL, DQ). Included into a namespace by row_loops_avx512.cc; see
// row_loops_impl.h for what a stripe must offer. bf16 is widened without shuffles: a vector of 32 values is read as 16
// words whose low halves are the even columns and whose high halves are the odd ones.

struct Floats {
    using Scalar = float;
    __m512 v[2];
    MOECOMM_INLINE static Floats broadcast(float value) { return {{_mm512_set1_ps(value), _mm512_set1_ps(value)}}; }
};

struct Doubles {
    using Scalar = double;
    __m512d v[4];
    MOECOMM_INLINE static Doubles broadcast(double value) {
        const __m512d all = _mm512_set1_pd(value);
        return {{all, all, all, all}};
    }
};

MOECOMM_INLINE Floats add(Floats a, Floats b) {
    return {{_mm512_add_ps(a.v[0], b.v[0]), _mm512_add_ps(a.v[1], b.v[1])}};
}

MOECOMM_INLINE Floats multiply(Floats a, Floats b) {
    return {{_mm512_mul_ps(a.v[0], b.v[0]), _mm512_mul_ps(a.v[1], b.v[1])}};
}

MOECOMM_INLINE Doubles add(Doubles a, Doubles b) {
    return {{_mm512_add_pd(a.v[0], b.v[0]), _mm512_add_pd(a.v[1], b.v[1]), _mm512_add_pd(a.v[2], b.v[2]),
             _mm512_add_pd(a.v[3], b.v[3])}};
}

MOECOMM_INLINE Doubles multiply(Doubles a, Doubles b) {
    return {{_mm512_mul_pd(a.v[0], b.v[0]), _mm512_mul_pd(a.v[1], b.v[1]), _mm512_mul_pd(a.v[2], b.v[2]),
             _mm512_mul_pd(a.v[3], b.v[3])}};
}

struct StripeFp64 {
    using Wide = Doubles;
    static constexpr int kBytes = 8;
    static constexpr int kBlock = 1;

    MOECOMM_INLINE static Wide load(const char* in) {
        return {{_mm512_loadu_pd(in), _mm512_loadu_pd(in + 64), _mm512_loadu_pd(in + 128), _mm512_loadu_pd(in + 192)}};
    }
    MOECOMM_INLINE static void store(char* out, Wide value) {
        const __m512d nan = _mm512_castsi512_pd(_mm512_set1_epi64(static_cast<int64_t>(kNanDouble)));
        for (int i = 0; i < 4; ++i) {
            const __mmask8 is_nan = _mm512_cmp_pd_mask(value.v[i], value.v[i], _CMP_UNORD_Q);
            _mm512_storeu_pd(out + 64 * i, _mm512_mask_blend_pd(is_nan, value.v[i], nan));
        }
    }
    MOECOMM_INLINE static void spread(double* out, Wide value) {
        for (int i = 0; i < 4; ++i) _mm512_storeu_pd(out + 8 * i, value.v[i]);
    }
};

MOECOMM_INLINE __m512 quiet(__m512 value) {
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps(is_nan, value, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kNanFloat))));
}

struct StripeFp32 {
    using Wide = Floats;
    static constexpr int kBytes = 4;
    static constexpr int kBlock = 1;

    MOECOMM_INLINE static Wide load(const char* in) { return {{_mm512_loadu_ps(in), _mm512_loadu_ps(in + 64)}}; }
    MOECOMM_INLINE static void store(char* out, Wide value) {
        _mm512_storeu_ps(out, quiet(value.v[0]));
        _mm512_storeu_ps(out + 64, quiet(value.v[1]));
    }
    MOECOMM_INLINE static void spread(float* out, Wide value) {
        _mm512_storeu_ps(out, value.v[0]);
        _mm512_storeu_ps(out + 16, value.v[1]);
    }
};

struct StripeBf16 {
    using Wide = Floats;
    static constexpr int kBytes = 2;
    static constexpr int kBlock = 2;

    MOECOMM_INLINE static Wide load(const char* in) {
        const __m512i pairs = _mm512_loadu_si512(in);
        const __m512i odd_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
                 _mm512_castsi512_ps(_mm512_and_si512(pairs, odd_half))}};
    }
    // The rounded value is in the upper half of each word; the lower half is rubbish.
    MOECOMM_INLINE static __m512i round(__m512 value) {
        const __m512i bits = _mm512_castps_si512(quiet(value));
        const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        return _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    }
    MOECOMM_INLINE static void store(char* out, Wide value) {
        const __m512i even = _mm512_srli_epi32(round(value.v[0]), 16);
        _mm512_storeu_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaau, even, round(value.v[1])));
    }
    MOECOMM_INLINE static void spread(float* out, Wide value) {
        float halves[2][16];
        _mm512_storeu_ps(halves[0], value.v[0]);
        _mm512_storeu_ps(halves[1], value.v[1]);
        for (int i = 0; i < 32; ++i) out[i] = halves[i % 2][i / 2];
    }
};

struct StripeFp16 {
    using Wide = Floats;
    static constexpr int kBytes = 2;
    static constexpr int kBlock = 2;

    MOECOMM_INLINE static __m256i load_half(const char* in) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
    }
    MOECOMM_INLINE static Wide load(const char* in) {
        return {{_mm512_cvtph_ps(load_half(in)), _mm512_cvtph_ps(load_half(in + 32))}};
    }
    MOECOMM_INLINE static __m256i round(__m512 value) {
        return _mm512_cvtps_ph(quiet(value), _MM_FROUND_TO_NEAREST_INT);
    }
    MOECOMM_INLINE static void store(char* out, Wide value) {
        const __m512i low = _mm512_castsi256_si512(round(value.v[0]));
        _mm512_storeu_si512(out, _mm512_inserti64x4(low, round(value.v[1]), 1));
    }
    MOECOMM_INLINE static void spread(float* out, Wide value) { StripeFp32::spread(out, value); }
};

// out is a multiple of 64, num_bytes a multiple of 64.
MOECOMM_INLINE void copy_lines(char* out, const char* in, size_t num_bytes) {
    const char* const end = in + num_bytes;
    for (; in + 256 <= end; in += 256, out += 256) {
        const __m512i a = _mm512_loadu_si512(in), b = _mm512_loadu_si512(in + 64);
        const __m512i c = _mm512_loadu_si512(in + 128), d = _mm512_loadu_si512(in + 192);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out + 64), b);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out + 128), c);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out + 192), d);
    }
    for (; in < end; in += 64, out += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), _mm512_loadu_si512(in));
}

MOECOMM_INLINE uint64_t read_lines(const char* in, size_t num_bytes) {
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    const char* const end = in + num_bytes;
    for (; in + 256 <= end; in += 256) {
        a = _mm512_xor_si512(a, _mm512_loadu_si512(in));
        b = _mm512_xor_si512(b, _mm512_loadu_si512(in + 64));
        c = _mm512_xor_si512(c, _mm512_loadu_si512(in + 128));
        d = _mm512_xor_si512(d, _mm512_loadu_si512(in + 192));
    }
    for (; in < end; in += 64) a = _mm512_xor_si512(a, _mm512_loadu_si512(in));
    uint64_t words[8], sum = 0;
    _mm512_storeu_si512(words, _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
    for (uint64_t word : words) sum ^= word;
    return sum;
}
