#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <optional>
#include <system_error>

#include "memory/arena.h"
#include "memory/mapping.h"

namespace py = pybind11;

namespace moecomm {

namespace {

// What the system refuses is an OSError with its number, as Python's own calls report it.
void translate(std::exception_ptr thrown) {
    try {
        if (thrown) std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
        const py::object arguments = py::make_tuple(error.code().value(), error.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

}  // namespace

void bind_memory(py::module_& m) {
    py::register_local_exception_translator(&translate);

    py::class_<Mapping, std::shared_ptr<Mapping>>(m, "Mapping", "A range of address space, private or shared by memfd.")
        .def_static("create_private", &Mapping::create_private, py::arg("nbytes"))
        .def_static("create_shared", &Mapping::create_shared, py::arg("label"), py::arg("nbytes"))
        .def_static("open_peer", &Mapping::open_peer, py::arg("pid"), py::arg("fd"), py::arg("nbytes"))
        .def_static(
            "borrow",
            [](std::uint64_t address, std::size_t nbytes, py::object owner) {
                // Dies where the last block or mapping does, which need not be in Python.
                auto* kept = new py::object(std::move(owner));
                return Mapping::borrow(address, nbytes, std::shared_ptr<void>(kept, [](void* object) {
                                           const py::gil_scoped_acquire gil;
                                           delete static_cast<py::object*>(object);
                                       }));
            },
            py::arg("address"), py::arg("nbytes"), py::arg("owner"),
            "Memory that `owner`, which is kept alive, holds at an address; not necessarily one of the host.")
        .def_property_readonly("address", &Mapping::address)
        .def_property_readonly("nbytes", &Mapping::nbytes)
        .def_property_readonly("fd", &Mapping::fd)
        .def("close_fd", &Mapping::close_fd)
        .def("punch", &Mapping::punch, py::arg("offset"), py::arg("nbytes"))
        .def("clear", &Mapping::clear, py::arg("offset"), py::arg("nbytes"))
        .def("pin", &Mapping::pin, py::arg("offset"), py::arg("nbytes"))
        .def("unpin", &Mapping::unpin, py::arg("offset"))
        .def("pinned_bytes", &Mapping::pinned_bytes)
        .def("is_unwanted", &Mapping::is_unwanted, py::arg("offset"))
        .def("resident_bytes", &Mapping::resident_bytes)
        .def(
            "view",
            [](const Mapping& self, std::size_t offset, std::size_t nbytes) {
                if (offset > self.nbytes() || nbytes > self.nbytes() - offset) throw py::index_error("outside mapping");
                return py::memoryview::from_memory(reinterpret_cast<void*>(self.address() + offset),
                                                   static_cast<py::ssize_t>(nbytes));
            },
            py::arg("offset"), py::arg("nbytes"), py::keep_alive<0, 1>());

    py::class_<Block>(m, "Block", py::buffer_protocol(), "One block of an arena; returns to it when this dies.")
        .def_property_readonly("offset", &Block::offset)
        .def_property_readonly("nbytes", &Block::nbytes)
        .def_property_readonly("address", &Block::address)
        .def_buffer([](Block& self) {
            return py::buffer_info(reinterpret_cast<void*>(self.address()), 1, "B",
                                   static_cast<py::ssize_t>(self.nbytes()));
        });

    py::class_<ArenaUsage>(m, "ArenaUsage")
        .def_readonly("live_bytes", &ArenaUsage::live_bytes)
        .def_readonly("live_blocks", &ArenaUsage::live_blocks)
        .def_readonly("peak_bytes", &ArenaUsage::peak_bytes)
        .def_readonly("touched_bytes", &ArenaUsage::touched_bytes)
        .def_readonly("limit", &ArenaUsage::limit)
        .def_readonly("num_allocations", &ArenaUsage::num_allocations);

    py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena", "Blocks of one mapping, lowest address first.")
        .def(py::init([](std::shared_ptr<Mapping> mapping, std::size_t limit, std::size_t begin,
                         std::optional<std::size_t> nbytes) {
                 const std::size_t rest = mapping->nbytes() > begin ? mapping->nbytes() - begin : 0;
                 return std::make_shared<Arena>(std::move(mapping), limit, begin, nbytes.value_or(rest));
             }),
             py::arg("mapping"), py::arg("limit"), py::arg("begin") = 0, py::arg("nbytes") = py::none())
        .def(
            "allocate",
            [](const std::shared_ptr<Arena>& self, std::size_t nbytes) -> std::unique_ptr<Block> {
                const auto offset = self->allocate(nbytes);
                if (!offset) return nullptr;
                return std::make_unique<Block>(self, *offset, nbytes);
            },
            py::arg("nbytes"), "A Block, or None when the limit does not allow it.")
        .def("trim", &Arena::trim)
        .def("usage", &Arena::usage);
}

}  // namespace moecomm
