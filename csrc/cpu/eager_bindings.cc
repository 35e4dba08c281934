// Binds the low-latency kernels; integers as in cpu_bindings.cc.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/eager.h"

namespace py = pybind11;

namespace moecomm {
namespace {

template <class T>
T* at(uint64_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_eager(py::module_& m) {
    m.def("send_eager", [](uint64_t topk_idx, bool is_int64, int64_t num_tokens, int64_t num_topk, uint64_t expert_rank,
                           int64_t num_experts, uint64_t rows, int64_t stride_bytes, int64_t row_bytes, uint64_t values,
                           int64_t value_bytes, const Addresses& windows, uint64_t ids_out) {
        const py::gil_scoped_release release;
        return send_eager({at<const void>(topk_idx), is_int64, num_tokens, num_topk, at<const int32_t>(expert_rank),
                           num_experts, static_cast<int64_t>(windows.size())},
                          {at<const char>(rows), stride_bytes, num_tokens, row_bytes}, at<const char>(values),
                          value_bytes, windows, at<int32_t>(ids_out));
    });
    m.def("receive_eager",
          [](const Addresses& windows, const std::vector<int64_t>& num_tokens, uint64_t expert_rank,
             uint64_t expert_local, int64_t num_experts, int64_t rank, uint64_t domain_experts, uint64_t domain_sources,
             int64_t num_topk, int64_t row_bytes, int64_t value_bytes, int64_t capacity, int64_t alignment,
             int64_t num_rows, uint64_t rows, uint64_t values, uint64_t used, uint64_t counts, uint64_t routes,
             uint64_t num_tokens_per_expert, uint64_t offsets, uint64_t tokens_per_expert) {
              EagerOverflow overflow{};
              {
                  const py::gil_scoped_release release;
                  overflow = receive_eager({windows,
                                            num_tokens,
                                            num_topk,
                                            at<const int32_t>(expert_rank),
                                            at<const int32_t>(expert_local),
                                            num_experts,
                                            rank,
                                            at<const uint8_t>(domain_experts),
                                            at<const uint8_t>(domain_sources),
                                            row_bytes,
                                            value_bytes,
                                            capacity,
                                            alignment,
                                            num_rows,
                                            at<char>(rows),
                                            at<char>(values),
                                            at<int64_t>(used),
                                            at<int32_t>(counts),
                                            at<int64_t>(routes),
                                            at<int32_t>(num_tokens_per_expert),
                                            at<int32_t>(offsets),
                                            at<int64_t>(tokens_per_expert)});
              }
              return std::make_tuple(overflow.index, overflow.need, overflow.room);
          });
    m.def("copy_expert_rows",
          [](uint64_t out, uint64_t in, int64_t row_bytes, uint64_t counts, int64_t num_ranks, int64_t num_experts,
             int64_t first_expert, int64_t num_local, int64_t capacity, int64_t alignment) {
              const py::gil_scoped_release release;
              copy_expert_rows(at<char>(out), at<const char>(in), row_bytes, at<const int32_t>(counts), num_ranks,
                               num_experts, first_expert, num_local, capacity, alignment);
          });
}

}  // namespace moecomm
