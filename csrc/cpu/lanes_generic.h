// Stripes of 32 columns in portable C++. Included into a namespace by row_loops_generic.cc; see row_loops_impl.h for
// what a stripe must offer.

template <class T>
struct PlainWide {
    using Scalar = T;
    T v[32];

    static PlainWide broadcast(T value) {
        PlainWide r;
        for (int i = 0; i < 32; ++i) r.v[i] = value;
        return r;
    }
};

template <class T>
inline PlainWide<T> add(const PlainWide<T>& a, const PlainWide<T>& b) {
    PlainWide<T> r;
    for (int i = 0; i < 32; ++i) r.v[i] = a.v[i] + b.v[i];
    return r;
}

template <class T>
inline PlainWide<T> multiply(const PlainWide<T>& a, const PlainWide<T>& b) {
    PlainWide<T> r;
    for (int i = 0; i < 32; ++i) r.v[i] = a.v[i] * b.v[i];
    return r;
}

// One stripe stored as Raw values; Raw converts to and from the wide type by the two functions.
template <class Raw, class T, T (*widen)(Raw), Raw (*narrow)(T)>
struct PlainStripe {
    using Wide = PlainWide<T>;
    static constexpr int kBytes = sizeof(Raw);
    static constexpr int kBlock = 1;

    static Wide load(const char* in) {
        Raw raw[32];
        std::memcpy(raw, in, sizeof raw);
        Wide r;
        for (int i = 0; i < 32; ++i) r.v[i] = widen(raw[i]);
        return r;
    }

    static void store(char* out, const Wide& value) {
        Raw raw[32];
        for (int i = 0; i < 32; ++i) raw[i] = narrow(value.v[i]);
        std::memcpy(out, raw, sizeof raw);
    }

    static void spread(T* out, const Wide& value) { std::memcpy(out, value.v, sizeof value.v); }
};

template <class T>
inline T same(T value) {
    return value;
}

inline float quiet_float(float value) { return value != value ? float_of(kNanFloat) : value; }

inline double quiet_double(double value) { return value != value ? double_of(kNanDouble) : value; }

using StripeFp64 = PlainStripe<double, double, same<double>, quiet_double>;
using StripeFp32 = PlainStripe<float, float, same<float>, quiet_float>;
using StripeBf16 = PlainStripe<uint16_t, float, float_from_bf16, bf16_from_float>;
using StripeFp16 = PlainStripe<uint16_t, float, float_from_half, half_from_float>;

inline void copy_lines(char* out, const char* in, size_t num_bytes) { std::memcpy(out, in, num_bytes); }

inline uint64_t read_lines(const char* in, size_t num_bytes) {
    uint64_t sum = 0;
    for (size_t i = 0; i < num_bytes; i += 8) {
        uint64_t word;
        std::memcpy(&word, in + i, sizeof word);
        sum ^= word;
    }
    return sum;
}
