// The Python module moecomm._C. Each part of csrc binds itself; this file only lists the parts.
#include <pybind11/pybind11.h>

namespace moecomm {
void bind_cpu(pybind11::module_& m);
void bind_eager(pybind11::module_& m);
void bind_memory(pybind11::module_& m);
void bind_sync(pybind11::module_& m);
void bind_ucx(pybind11::module_& m);
}  // namespace moecomm

PYBIND11_MODULE(_C, m) {
    m.doc() = "Native part of moecomm: rows, memory and counters on raw addresses.";
    moecomm::bind_cpu(m);
    moecomm::bind_eager(m);
    moecomm::bind_memory(m);
    moecomm::bind_sync(m);
    moecomm::bind_ucx(m);
}
