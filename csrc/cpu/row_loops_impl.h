// The column loops, written once over stripes of 32 columns. A row_loops_<set>.cc includes, inside its own namespace,
// its lanes_<set>.h and then this file, so that each set has its own copies of every function, compiled for that set.
//
// A stripe type offers
//   Wide              32 values in the type that sums are made in; add, multiply, Wide::broadcast, Wide::Scalar
//   kBytes, kBlock    bytes of one value in memory; how many stripes fit in registers at once
//   load, store       32 values from and to memory at any address; store rounds once and makes NaN canonical
//   spread            the 32 values in column order
// and the set offers copy_lines (streaming stores of whole lines) and read_lines.

// Stores a stripe, past the caches if out is a multiple of 64 and that is wanted.
template <class Stripe>
MOECOMM_INLINE void put(char* out, typename Stripe::Wide value, bool is_streaming) {
    if (!is_streaming) {
        Stripe::store(out, value);
        return;
    }
    alignas(64) char lines[32 * Stripe::kBytes];
    Stripe::store(lines, value);
    copy_lines(out, lines, sizeof lines);
}

template <class Stripe, bool weighted, int num_stripes>
MOECOMM_INLINE void reduce_block(const ReduceArgs& args, int64_t offset, const char* const* fetch, int64_t fetch_at) {
    using Wide = typename Stripe::Wide;
    using Scalar = typename Wide::Scalar;
    constexpr int64_t stripe = 32 * Stripe::kBytes;
    const Scalar* const weights = static_cast<const Scalar*>(args.weights);
    Wide sum[num_stripes];
    for (int s = 0; s < num_stripes; ++s) sum[s] = Wide::broadcast(Scalar(0));
    for (int64_t j = 0; j < args.num_rows; ++j) {
        for (int64_t line = 0; line < num_stripes * stripe; line += 64) MOECOMM_PREFETCH(fetch[j] + fetch_at + line);
        const char* const in = args.rows[j] + offset;
        const Wide weight = Wide::broadcast(weighted ? weights[j] : Scalar(1));
        for (int s = 0; s < num_stripes; ++s) {
            Wide value = Stripe::load(in + s * stripe);
            if (weighted) value = multiply(weight, value);
            sum[s] = add(sum[s], value);
        }
    }
    for (int s = 0; s < num_stripes; ++s) put<Stripe>(args.out + offset + s * stripe, sum[s], args.is_streaming);
}

template <class Stripe, bool weighted>
MOECOMM_TARGET void reduce_columns(const ReduceArgs& args) {
    constexpr int64_t stripe = 32 * Stripe::kBytes;
    constexpr int64_t block = Stripe::kBlock * stripe;
    const int64_t num_bytes = args.num_columns * Stripe::kBytes;
    int64_t offset = 0;
    for (; offset + args.fetch_bytes + block <= num_bytes; offset += block)
        reduce_block<Stripe, weighted, Stripe::kBlock>(args, offset, args.rows, offset + args.fetch_bytes);
    const char* const* const ahead = args.rows + args.rows_ahead;
    for (; offset + block <= num_bytes; offset += block)
        reduce_block<Stripe, weighted, Stripe::kBlock>(args, offset, ahead, offset + args.fetch_bytes - num_bytes);
    for (; offset + stripe <= num_bytes; offset += stripe)
        reduce_block<Stripe, weighted, 1>(args, offset, ahead, offset + args.fetch_bytes - num_bytes);
    if (offset == num_bytes) return;
    // The columns left over go through a zero-filled stripe.
    using Wide = typename Stripe::Wide;
    using Scalar = typename Wide::Scalar;
    const Scalar* const weights = static_cast<const Scalar*>(args.weights);
    char tail[stripe] = {};
    Wide sum = Wide::broadcast(Scalar(0));
    for (int64_t j = 0; j < args.num_rows; ++j) {
        std::memcpy(tail, args.rows[j] + offset, static_cast<size_t>(num_bytes - offset));
        Wide value = Stripe::load(tail);
        if (weighted) value = multiply(Wide::broadcast(weights[j]), value);
        sum = add(sum, value);
    }
    Stripe::store(tail, sum);
    std::memcpy(args.out + offset, tail, static_cast<size_t>(num_bytes - offset));
}

template <class Stripe>
MOECOMM_TARGET void reduce(const ReduceArgs& args) {
    if (args.weights != nullptr)
        reduce_columns<Stripe, true>(args);
    else
        reduce_columns<Stripe, false>(args);
}

template <class Stripe>
MOECOMM_TARGET void scale(char* out, const char* in, double weight, int64_t num_columns, bool is_streaming) {
    using Wide = typename Stripe::Wide;
    constexpr int64_t stripe = 32 * Stripe::kBytes;
    const Wide factor = Wide::broadcast(static_cast<typename Wide::Scalar>(weight));
    const int64_t num_bytes = num_columns * Stripe::kBytes;
    int64_t offset = 0;
    for (; offset + stripe <= num_bytes; offset += stripe)
        put<Stripe>(out + offset, multiply(factor, Stripe::load(in + offset)), is_streaming);
    if (offset == num_bytes) return;
    char tail[stripe] = {};
    std::memcpy(tail, in + offset, static_cast<size_t>(num_bytes - offset));
    Stripe::store(tail, multiply(factor, Stripe::load(tail)));
    std::memcpy(out + offset, tail, static_cast<size_t>(num_bytes - offset));
}

template <class Stripe>
MOECOMM_TARGET double scale_dot(char* out, const char* g, const char* y, double weight, int64_t num_columns) {
    using Wide = typename Stripe::Wide;
    using Scalar = typename Wide::Scalar;
    constexpr int64_t stripe = 32 * Stripe::kBytes;
    const Wide factor = Wide::broadcast(static_cast<Scalar>(weight));
    const int64_t num_bytes = num_columns * Stripe::kBytes;
    Wide sum = Wide::broadcast(Scalar(0));
    int64_t offset = 0;
    for (; offset + stripe <= num_bytes; offset += stripe) {
        const Wide value = Stripe::load(g + offset);
        sum = add(sum, multiply(value, Stripe::load(y + offset)));
        Stripe::store(out + offset, multiply(factor, value));
    }
    if (offset < num_bytes) {
        char tail[2][stripe] = {};
        std::memcpy(tail[0], g + offset, static_cast<size_t>(num_bytes - offset));
        std::memcpy(tail[1], y + offset, static_cast<size_t>(num_bytes - offset));
        const Wide value = Stripe::load(tail[0]);
        sum = add(sum, multiply(value, Stripe::load(tail[1])));
        Stripe::store(tail[0], multiply(factor, value));
        std::memcpy(out + offset, tail[0], static_cast<size_t>(num_bytes - offset));
    }
    Scalar lanes[kDotLanes];
    Stripe::spread(lanes, sum);
    for (int step = kDotLanes / 2; step > 0; step /= 2)
        for (int j = 0; j < step; ++j) lanes[j] = lanes[j] + lanes[j + step];
    return lanes[0] != lanes[0] ? double_of(kNanDouble) : lanes[0];
}

MOECOMM_TARGET void copy_streaming(char* out, const char* in, size_t num_bytes) {
    const size_t misaligned = static_cast<size_t>(-reinterpret_cast<uintptr_t>(out) & 63u);
    const size_t head = misaligned < num_bytes ? misaligned : num_bytes;
    if (head != 0) std::memcpy(out, in, head);
    const size_t lines = (num_bytes - head) & ~size_t{63};
    copy_lines(out + head, in + head, lines);
    const size_t done = head + lines;
    if (done != num_bytes) std::memcpy(out + done, in + done, num_bytes - done);
}

MOECOMM_TARGET uint64_t read(const char* in, size_t num_bytes) {
    const size_t lines = num_bytes & ~size_t{63};
    uint64_t sum = read_lines(in, lines);
    for (size_t i = lines; i < num_bytes; i += 8) {
        uint64_t word = 0;
        std::memcpy(&word, in + i, num_bytes - i < 8 ? num_bytes - i : 8);
        sum ^= word;
    }
    return sum;
}

constexpr RowLoops kRowLoops = {
    copy_streaming,
    {reduce<StripeFp64>, reduce<StripeFp32>, reduce<StripeBf16>, reduce<StripeFp16>},
    {scale<StripeFp64>, scale<StripeFp32>, scale<StripeBf16>, scale<StripeFp16>},
    {scale_dot<StripeFp64>, scale_dot<StripeFp32>, scale_dot<StripeBf16>, scale_dot<StripeFp16>},
    read,
};
