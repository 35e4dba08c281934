#include "transport/ucp_api.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>

namespace moecomm::ucp {
namespace {

template <class Function>
void find(void* library, const std::string& name, Function& function) {
    void* const address = dlsym(library, name.c_str());
    if (address == nullptr) throw std::runtime_error("UCX has no function " + name);
    function = reinterpret_cast<Function>(address);
}

void* open(const std::string& path) {
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return library;
}

Api resolve(void* ucp) {
    Api api{};
    find(ucp, "ucp_get_version", api.get_version);
    find(ucp, "ucp_init_version", api.init_version);
    find(ucp, "ucp_cleanup", api.cleanup);
    find(ucp, "ucp_worker_create", api.worker_create);
    find(ucp, "ucp_worker_destroy", api.worker_destroy);
    find(ucp, "ucp_worker_query", api.worker_query);
    find(ucp, "ucp_worker_release_address", api.worker_release_address);
    find(ucp, "ucp_worker_progress", api.worker_progress);
    find(ucp, "ucp_worker_get_efd", api.worker_get_efd);
    find(ucp, "ucp_worker_arm", api.worker_arm);
    find(ucp, "ucp_worker_set_am_recv_handler", api.worker_set_am_recv_handler);
    find(ucp, "ucp_ep_create", api.ep_create);
    find(ucp, "ucp_ep_close_nbx", api.ep_close_nbx);
    find(ucp, "ucp_am_send_nbx", api.am_send_nbx);
    find(ucp, "ucp_am_recv_data_nbx", api.am_recv_data_nbx);
    find(ucp, "ucp_ep_query", api.ep_query);
    find(ucp, "ucp_ep_flush_nbx", api.ep_flush_nbx);
    find(ucp, "ucp_mem_map", api.mem_map);
    find(ucp, "ucp_mem_unmap", api.mem_unmap);
    find(ucp, "ucp_rkey_pack", api.rkey_pack);
    find(ucp, "ucp_rkey_buffer_release", api.rkey_buffer_release);
    find(ucp, "ucp_ep_rkey_unpack", api.ep_rkey_unpack);
    find(ucp, "ucp_rkey_destroy", api.rkey_destroy);
    find(ucp, "ucp_put_nbx", api.put_nbx);
    find(ucp, "ucp_request_check_status", api.request_check_status);
    find(ucp, "ucp_request_free", api.request_free);
    // Looking a name up in a library also looks in those that it depends on.
    find(ucp, "ucs_status_string", api.status_string);
    return api;
}

}  // namespace

const Api& load(const std::string& path) {
    static std::mutex mutex;
    static std::map<std::string, Api> loaded;
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = loaded.find(path);
    if (found == loaded.end()) found = loaded.emplace(path, resolve(open(path))).first;
    return found->second;
}

}  // namespace moecomm::ucp
