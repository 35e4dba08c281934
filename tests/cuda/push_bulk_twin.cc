// csrc/cuda/push_bulk.cu, run on the CPU: compiled into a library that a test loads.
#include <push_bulk.cu>

// Arguments as of push_bulk; gives 0, or 1 with the first failure in `failure`.
extern "C" int run_push_bulk(unsigned num_blocks, std::int64_t shared_bytes, unsigned seed, char* failure,
                             std::size_t failure_bytes, const char* rows, std::int64_t row_stride,
                             std::int64_t num_tokens, std::int64_t row_bytes, const long long* routes,
                             std::int64_t num_slots, const long long* addresses, std::int64_t piece_bytes,
                             const long long* status) {
    const std::string found = emulation::launch(num_blocks, shared_bytes, seed, [=] {
        push_bulk(rows, row_stride, num_tokens, row_bytes, routes, num_slots, addresses, piece_bytes, status);
    });
    std::strncpy(failure, found.c_str(), failure_bytes - 1);
    failure[failure_bytes - 1] = '\0';
    return found.empty() ? 0 : 1;
}
