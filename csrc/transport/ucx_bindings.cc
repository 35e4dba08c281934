#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "transport/ucx.h"

namespace py = pybind11;

namespace moecomm {
namespace {

using release_gil = py::call_guard<py::gil_scoped_release>;

void hear_interrupts() {
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

void bind_ucx(py::module_& m) {
    m.attr("UCX_API_VERSION") = py::make_tuple(ucp::kApiMajor, ucp::kApiMinor);
    py::class_<UcxWire>(m, "UcxWire", "One rank's end of the connections that UCX makes.")
        .def(py::init([](const std::string& library, int rank, int num_ranks, std::shared_ptr<SignalBoard> board,
                         bool yields) {
                 auto wire = std::make_unique<UcxWire>(library, rank, num_ranks, std::move(board), yields);
                 wire->set_interrupt(&hear_interrupts);
                 return wire;
             }),
             py::arg("library"), py::arg("rank"), py::arg("num_ranks"), py::arg("board"), py::arg("yields"))
        .def("address", [](const UcxWire& self) { return py::bytes(self.address()); })
        .def("connect", &UcxWire::connect, py::arg("addresses"), py::arg("secret"), release_gil())
        .def("greeted", &UcxWire::greeted, py::arg("timeout"), release_gil())
        .def("lanes", &UcxWire::lanes, py::arg("peer"), release_gil())
        .def("allow_one_sided", &UcxWire::allow_one_sided, py::arg("peer"), py::arg("least_bytes"), release_gil())
        .def("withhold_memory", &UcxWire::withhold_memory, release_gil())
        .def("num_one_sided", &UcxWire::num_one_sided, py::arg("peer"), release_gil())
        .def("registered_bytes", &UcxWire::registered_bytes, release_gil())
        .def("set_region", &UcxWire::set_region, py::arg("index"), py::arg("mapping"), release_gil())
        .def(
            "put",
            [](UcxWire& self, int peer, int region, std::uint64_t offset, std::uint64_t source, std::size_t nbytes,
               int slot, std::uint64_t n, double timeout) {
                return self.put(peer, region, offset, reinterpret_cast<const void*>(source), nbytes, slot, n, timeout);
            },
            py::arg("peer"), py::arg("region"), py::arg("offset"), py::arg("source"), py::arg("nbytes"),
            py::arg("slot"), py::arg("n"), py::arg("timeout"), release_gil())
        .def("signal", &UcxWire::signal, py::arg("peer"), py::arg("slot"), py::arg("n"), py::arg("timeout"),
             release_gil())
        .def("flush", &UcxWire::flush, py::arg("timeout"), release_gil())
        .def("close", &UcxWire::close, py::arg("timeout"), release_gil())
        .def("notes", &UcxWire::notes, release_gil());
}

}  // namespace moecomm
