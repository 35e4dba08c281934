// Binds the row kernels. Everything is an integer here: addresses of contiguous arrays and their sizes. The callers in
// moecomm/kernels/cpu.py have checked them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "check.h"
#include "cpu/combine.h"
#include "cpu/features.h"
#include "cpu/gradient.h"
#include "cpu/plan.h"
#include "cpu/push.h"
#include "cpu/routing.h"
#include "cpu/stream.h"
#include "cpu/values.h"

namespace py = pybind11;

namespace moecomm {
namespace {

using Address = uint64_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// Lets other Python threads run while the work is large enough to be worth the switch.
class ReleaseGil {
  public:
    explicit ReleaseGil(int64_t num_bytes) {
        if (num_bytes >= (int64_t{1} << 16)) release_.emplace();
    }

  private:
    std::optional<py::gil_scoped_release> release_;
};

Routing routing_of(Address topk_idx, bool is_int64, int64_t num_tokens, int64_t num_topk, Address expert_rank,
                   int64_t num_experts, int64_t num_ranks) {
    return {at<const void>(topk_idx),       is_int64,    num_tokens, num_topk,
            at<const int32_t>(expert_rank), num_experts, num_ranks};
}

void bind_routing(py::module_& m) {
    m.def("count_routes", [](Address topk_idx, bool is_int64, int64_t num_tokens, int64_t num_topk, Address expert_rank,
                             int64_t num_experts, int64_t num_ranks, Address counts) {
        ReleaseGil release(num_tokens * num_topk * 8);
        return count_routes(routing_of(topk_idx, is_int64, num_tokens, num_topk, expert_rank, num_experts, num_ranks),
                            at<int32_t>(counts));
    });
    m.def("plan_expert_major", [](Address topk_idx, bool is_int64, int64_t num_tokens, int64_t num_topk,
                                  Address expert_rank, int64_t num_experts, Address bases, Address routes) {
        ReleaseGil release(num_tokens * num_topk * 8);
        plan_expert_major(routing_of(topk_idx, is_int64, num_tokens, num_topk, expert_rank, num_experts, 0),
                          at<const int64_t>(bases), at<int64_t>(routes));
    });
    m.def("plan_flat", [](Address topk_idx, bool is_int64, int64_t num_tokens, int64_t num_topk, Address expert_rank,
                          int64_t num_experts, int64_t num_ranks, Address bases, Address routes) {
        ReleaseGil release(num_tokens * num_topk * 8);
        plan_flat(routing_of(topk_idx, is_int64, num_tokens, num_topk, expert_rank, num_experts, num_ranks),
                  at<const int64_t>(bases), at<int64_t>(routes));
    });
}

// What numpy needs to know of a vector's copy.
template <class T>
py::array_t<T> array_of(const std::vector<T>& values) {
    return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

void bind_plan(py::module_& m) {
    m.def("plan_exchange", [](const py::array_t<int32_t, py::array::c_style>& counts,
                              const py::array_t<int64_t, py::array::c_style>& first_expert, int64_t rank, int order,
                              int64_t alignment, int64_t capacity) {
        const int64_t num_ranks = first_expert.size() - 1, num_experts = first_expert.at(num_ranks);
        MC_CHECK(counts.ndim() == 2 && counts.shape(0) == num_ranks && counts.shape(1) == num_experts + num_ranks,
                 "plan_exchange: counts must be [R, E + R]");
        MC_CHECK(rank >= 0 && rank < num_ranks && alignment >= 1, "plan_exchange: rank or alignment out of range");
        const ExchangePlan plan = plan_exchange({counts.data(), num_ranks, num_experts, first_expert.data(), rank,
                                                 static_cast<RowOrder>(order), alignment, capacity});
        return py::make_tuple(array_of(plan.bases), plan.rows_per_rank, array_of(plan.num_tokens_per_expert),
                              array_of(plan.offsets), plan.num_rows, plan.most_rows, plan.overflow_index,
                              plan.overflow_rows);
    });
}

void bind_rows(py::module_& m) {
    m.def("push_rows", [](Address rows, int64_t stride_bytes, int64_t num_rows, int64_t row_bytes, Address routes,
                          int64_t num_slots, const Addresses& addresses) {
        ReleaseGil release(num_rows * num_slots * row_bytes);
        push_rows({at<const char>(rows), stride_bytes, num_rows, row_bytes}, at<const int64_t>(routes), num_slots,
                  addresses);
    });
    m.def("push_weighted_rows", [](Address rows, int64_t stride_bytes, int64_t num_rows, int64_t row_bytes, int format,
                                   Address routes, int64_t num_slots, const Addresses& addresses, Address weights) {
        ReleaseGil release(num_rows * num_slots * row_bytes);
        push_weighted_rows({at<const char>(rows), stride_bytes, num_rows, row_bytes}, static_cast<Format>(format),
                           at<const int64_t>(routes), num_slots, addresses, at<const void>(weights));
    });
    m.def("combine_rows", [](Address out, int64_t num_tokens, int64_t num_columns, int format, Address routes,
                             int64_t num_slots, const Addresses& addresses, Address weights) {
        ReleaseGil release(num_tokens * num_slots * num_columns * 4);
        combine_rows(at<char>(out), num_tokens, num_columns, static_cast<Format>(format), at<const int64_t>(routes),
                     num_slots, addresses, at<const void>(weights));
    });
    m.def("scale_dot", [](Address scaled, Address dots, Address g, Address y, Address weights, int64_t num_rows,
                          int64_t num_columns, int format) {
        ReleaseGil release(num_rows * num_columns * 4);
        scale_dot(at<char>(scaled), at<void>(dots), at<const char>(g), at<const char>(y), at<const void>(weights),
                  num_rows, num_columns, static_cast<Format>(format));
    });
}

// Calls the function with a float or a double, for values of so many bytes.
template <class Function>
void with_value_of(int num_bytes, const Function& function) {
    if (num_bytes == sizeof(double))
        function(double{});
    else
        function(float{});
}

void bind_values(py::module_& m) {
    m.def("push_values", [](Address values, int value_bytes, Address routes, int64_t num_tokens, int64_t num_slots,
                            const Addresses& addresses) {
        ReleaseGil release(num_tokens * num_slots * 8);
        with_value_of(value_bytes, [&](auto value) {
            push_values(at<const decltype(value)>(values), at<const int64_t>(routes), num_tokens, num_slots, addresses);
        });
    });
    m.def("pull_values", [](Address out, int value_bytes, Address routes, int64_t num_tokens, int64_t num_slots,
                            const Addresses& addresses) {
        ReleaseGil release(num_tokens * num_slots * 8);
        with_value_of(value_bytes, [&](auto value) {
            pull_values(at<decltype(value)>(out), at<const int64_t>(routes), num_tokens, num_slots, addresses);
        });
    });
    m.def("push_flat_metadata",
          [](Address topk_idx, bool is_int64, int64_t num_tokens, int64_t num_topk, Address expert_rank,
             Address expert_local, int64_t num_experts, Address weights, int value_bytes, Address routes,
             int64_t num_slots, const Addresses& idx_addresses, const Addresses& weight_addresses) {
              ReleaseGil release(num_tokens * num_topk * 8);
              const Routing routing = routing_of(topk_idx, is_int64, num_tokens, num_topk, expert_rank, num_experts, 0);
              with_value_of(value_bytes, [&](auto value) {
                  push_flat_metadata(routing, at<const int32_t>(expert_local), at<const decltype(value)>(weights),
                                     at<const int64_t>(routes), num_slots, idx_addresses, weight_addresses);
              });
          });
    m.def("pull_flat_values",
          [](Address out, int value_bytes, Address topk_idx, bool is_int64, int64_t num_tokens, int64_t num_topk,
             Address expert_rank, int64_t num_experts, Address routes, int64_t num_slots, const Addresses& addresses) {
              ReleaseGil release(num_tokens * num_topk * 8);
              const Routing routing = routing_of(topk_idx, is_int64, num_tokens, num_topk, expert_rank, num_experts, 0);
              with_value_of(value_bytes, [&](auto value) {
                  pull_flat_values(at<decltype(value)>(out), routing, at<const int64_t>(routes), num_slots, addresses);
              });
          });
}

void bind_machine(py::module_& m) {
    m.def("set_instruction_set", &select_instruction_set);
    m.def("instruction_set", [] { return name_of(selected_instruction_set()); });
    m.def("cpu_features", [] {
        py::dict features;
        for (InstructionSet set : all_instruction_sets()) features[name_of(set)] = is_available(set);
        return features;
    });
    m.def("stream_copy", [](Address out, Address in, size_t num_bytes) {
        py::gil_scoped_release release;
        stream_copy(at<char>(out), at<const char>(in), num_bytes);
    });
    m.def("stream_scatter", [](Address out, Address in, int64_t num_rows, int64_t row_bytes, int64_t num_copies) {
        py::gil_scoped_release release;
        stream_scatter(at<char>(out), at<const char>(in), num_rows, row_bytes, num_copies);
    });
    m.def("stream_read", [](Address in, size_t num_bytes) {
        py::gil_scoped_release release;
        return stream_read(at<const char>(in), num_bytes);
    });
}

}  // namespace

void bind_cpu(py::module_& m) {
    bind_routing(m);
    bind_plan(m);
    bind_rows(m);
    bind_values(m);
    bind_machine(m);
}

}  // namespace moecomm
