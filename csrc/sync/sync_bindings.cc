#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>

#include "check.h"
#include "sync/board.h"
#include "sync/cards.h"
#include "sync/process.h"

namespace py = pybind11;

namespace moecomm {
namespace {

// Waits in slices, so that an interrupt from the keyboard is heard; the GIL is free while waiting.
template <class Wait>
int wait_interruptible(double timeout, const Wait& wait) {
    std::int64_t left = static_cast<std::int64_t>(std::min(timeout, 1e9) * 1e9);
    constexpr std::int64_t slice = 200'000'000;
    for (;;) {
        WaitStatus status;
        {
            const py::gil_scoped_release release;
            status = wait(std::min(left, slice));
        }
        left -= slice;
        if (status != WaitStatus::kTimeout || left <= 0) return static_cast<int>(status);
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

}  // namespace

void bind_sync(py::module_& m) {
    m.def("read_cards", [](std::uint64_t address, std::int64_t stride_bytes, int num_ranks, int num_agreed, int refused,
                           int recording, int first, int num_columns, const std::vector<std::int64_t>& bases) {
        MC_CHECK(bases.empty() || static_cast<int>(bases.size()) == num_ranks, "read_cards: one base per rank");
        std::vector<std::int64_t> words;
        const CardState state = read_cards({address, stride_bytes, num_ranks, num_agreed, refused, recording}, first,
                                           num_columns, bases, words);
        py::list columns;
        for (int column = 0; column < num_columns && state != CardState::kDiffer; ++column) {
            py::list values(static_cast<std::size_t>(num_ranks));
            for (int rank = 0; rank < num_ranks; ++rank)
                values[static_cast<std::size_t>(rank)] = words[static_cast<std::size_t>(column) * num_ranks + rank];
            columns.append(values);
        }
        return py::make_tuple(static_cast<int>(state), columns);
    });
    m.def("file_cards", [](const std::vector<std::uint64_t>& sources, const std::vector<std::uint64_t>& targets,
                           std::size_t nbytes, std::int64_t sequence) {
        MC_CHECK(sources.size() == targets.size(), "file_cards: one target per source");
        for (std::size_t i = 0; i < sources.size(); ++i) file_card(sources[i], targets[i], nbytes, sequence);
    });
    py::class_<SignalBoard, std::shared_ptr<SignalBoard>>(m, "SignalBoard",
                                                          "Counters by which ranks tell each other how far they are.")
        .def_static("board_bytes", &SignalBoard::board_bytes, py::arg("num_ranks"), py::arg("num_slots"))
        .def(py::init<int, int, std::vector<std::uint64_t>, const std::vector<int>&, std::int64_t,
                      std::vector<std::shared_ptr<Mapping>>>(),
             py::arg("rank"), py::arg("num_slots"), py::arg("boards"), py::arg("pids"), py::arg("spin_ns"),
             py::arg("mappings"))
        .def("signal", &SignalBoard::signal, py::arg("peer"), py::arg("slot"), py::arg("n"))
        .def("signal_all", &SignalBoard::signal_all, py::arg("slot"), py::arg("n"))
        .def("total", &SignalBoard::total, py::arg("slot"))
        .def(
            "post",
            [](SignalBoard& self, std::uint64_t source, std::size_t nbytes, std::vector<std::uint64_t> destinations,
               std::uint64_t offset, int slot, std::uint64_t n) {
                for (std::uint64_t& destination : destinations) destination += offset;
                self.post(reinterpret_cast<const void*>(source), nbytes, destinations, slot, n);
            },
            py::arg("source"), py::arg("nbytes"), py::arg("destinations"), py::arg("offset"), py::arg("slot"),
            py::arg("n"))
        .def(
            "wait",
            [](SignalBoard& self, int slot, std::uint64_t at_least, double timeout) {
                if (self.reached(slot, at_least)) return static_cast<int>(WaitStatus::kReached);
                return wait_interruptible(timeout,
                                          [&](std::int64_t slice) { return self.wait(slot, at_least, slice); });
            },
            py::arg("slot"), py::arg("at_least"), py::arg("timeout"))
        .def(
            "wait_at",
            [](SignalBoard& self, int slot, const std::vector<std::pair<int, int>>& lanes, std::uint64_t at_least,
               double timeout) {
                return wait_interruptible(
                    timeout, [&](std::int64_t slice) { return self.wait_at(slot, lanes, at_least, slice); });
            },
            py::arg("slot"), py::arg("lanes"), py::arg("at_least"), py::arg("timeout"))
        .def("traffic", &SignalBoard::traffic, py::arg("first_slot"), py::arg("num_slots"))
        .def(
            "wait_traffic",
            [](SignalBoard& self, int first_slot, int num_slots, std::uint64_t beyond, double timeout) {
                return wait_interruptible(timeout, [&](std::int64_t slice) {
                    return self.wait_traffic(first_slot, num_slots, beyond, slice);
                });
            },
            py::arg("first_slot"), py::arg("num_slots"), py::arg("beyond"), py::arg("timeout"))
        .def("reached", &SignalBoard::reached, py::arg("slot"), py::arg("at_least"))
        .def("lane", &SignalBoard::lane, py::arg("slot"), py::arg("source"))
        .def("lane_at", &SignalBoard::lane_at, py::arg("slot"), py::arg("rank"), py::arg("source"))
        .def("waited_ns", &SignalBoard::waited_ns)
        .def("longest_wait_ns", &SignalBoard::longest_wait_ns)
        .def("gone", &SignalBoard::gone)
        .def("process_alive", &SignalBoard::process_alive, py::arg("peer"))
        .def("depart", &SignalBoard::depart)
        .def("mark_departed", &SignalBoard::mark_departed, py::arg("peer"));
}

}  // namespace moecomm
