#include <pybind11/pybind11.h>

namespace moecomm {
void bind_memory(pybind11::module_& m) { (void)m; }
}  // namespace moecomm
