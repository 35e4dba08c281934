// The part of UCX's UCP interface that transport `ucx` uses, as functions of a library that is loaded at run time.
//
// UCX may be absent, at build time and at run time, so its headers are not needed: what is declared here is its binary
// interface since version 1.15. Every structure of it begins with a mask of the fields that are filled in, so later
// versions only append. tests/native/ucp_abi.cc compares each size, offset and constant with the real headers.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace moecomm::ucp {

constexpr unsigned kApiMajor = 1;
constexpr unsigned kApiMinor = 15;

using Status = std::int8_t;  // a packed enumeration there
constexpr Status kOk = 0;
constexpr Status kInProgress = 1;
constexpr Status kErrorBusy = -15;
constexpr Status kErrorLast = -100;

struct OpaqueContext;
struct OpaqueWorker;
struct OpaqueEndpoint;
struct OpaqueMemory;
struct OpaqueRemoteKey;
using Context = OpaqueContext*;
using Worker = OpaqueWorker*;
using Endpoint = OpaqueEndpoint*;
using Memory = OpaqueMemory*;
using RemoteKey = OpaqueRemoteKey*;

// What a non-blocking call returns: null = done, an error's number, or a request in progress.
using Request = void*;
inline bool is_error(Request request) {
    return reinterpret_cast<std::uintptr_t>(request) >= static_cast<std::uintptr_t>(std::intptr_t{kErrorLast});
}
inline bool is_pending(Request request) { return request != nullptr && !is_error(request); }
inline Status status_of(Request request) {
    return static_cast<Status>(reinterpret_cast<std::intptr_t>(is_pending(request) ? nullptr : request));
}

using SendCallback = void (*)(void* request, Status status, void* user_data);
using ReceiveCallback = void (*)(void* request, Status status, std::size_t length, void* user_data);
using ErrorCallback = void (*)(void* arg, Endpoint endpoint, Status status);

constexpr std::uint64_t kParamsFeatures = 1 << 0;
constexpr std::uint64_t kParamsNumEndpoints = 1 << 6;
constexpr std::uint64_t kFeatureOneSided = 1 << 1;
constexpr std::uint64_t kFeatureWakeup = 1 << 4;
constexpr std::uint64_t kFeatureActiveMessages = 1 << 6;
struct Params {
    std::uint64_t field_mask;
    std::uint64_t features;
    std::size_t request_size;
    void* request_init;
    void* request_cleanup;
    std::uint64_t tag_sender_mask;
    int mt_workers_shared;
    std::size_t estimated_num_eps;
    std::size_t estimated_num_ppn;
    const char* name;
};

constexpr std::uint64_t kWorkerThreadMode = 1 << 0;
constexpr int kThreadModeSerialized = 1;
struct WorkerParams {
    std::uint64_t field_mask;
    int thread_mode;
    std::uint64_t cpu_mask[16];
    unsigned events;
    void* user_data;
    int event_fd;
    std::uint64_t flags;
    const char* name;
    std::size_t am_alignment;
    std::uint64_t client_id;
};

constexpr std::uint64_t kWorkerAttrAddress = 1 << 1;
constexpr std::uint64_t kWorkerAttrMaxHeader = 1 << 3;
struct WorkerAttr {
    std::uint64_t field_mask;
    int thread_mode;
    std::uint32_t address_flags;
    void* address;
    std::size_t address_length;
    std::size_t max_am_header;
    char name[32];
    std::size_t max_debug_string;
};

struct SocketAddress {
    const sockaddr* addr;
    socklen_t addrlen;
};
struct ErrorHandler {
    ErrorCallback callback;
    void* arg;
};
constexpr std::uint64_t kEndpointRemoteAddress = 1 << 0;
constexpr std::uint64_t kEndpointErrorMode = 1 << 1;
constexpr std::uint64_t kEndpointErrorHandler = 1 << 2;
constexpr int kErrorModePeer = 1;
struct EndpointParams {
    std::uint64_t field_mask;
    const void* address;
    int err_mode;
    ErrorHandler err_handler;
    void* user_data;
    unsigned flags;
    SocketAddress sockaddr;
    void* conn_request;
    const char* name;
    SocketAddress local_sockaddr;
};

struct Lane {
    const char* transport_name;
    const char* device_name;
};
struct Lanes {
    Lane* entries;
    unsigned num_entries;
    std::size_t entry_size;
};
constexpr std::uint64_t kEndpointAttrLanes = 1 << 3;
struct EndpointAttr {
    std::uint64_t field_mask;
    char name[32];
    sockaddr_storage local_sockaddr;
    sockaddr_storage remote_sockaddr;
    Lanes transports;
    void* user_data;
};

constexpr std::uint64_t kMapAddress = 1 << 0;
constexpr std::uint64_t kMapLength = 1 << 1;
struct MapParams {
    std::uint64_t field_mask;
    void* address;
    std::size_t length;
    unsigned flags;
    unsigned prot;
    int memory_type;
    const void* exported_memh_buffer;
};

constexpr std::uint32_t kOpCallback = 1 << 1;
constexpr std::uint32_t kOpUserData = 1 << 2;
constexpr std::uint32_t kOpFlags = 1 << 4;
constexpr std::uint32_t kCloseForce = 1 << 0;
constexpr std::uint32_t kSendEager = 1 << 1;
struct RequestParam {
    std::uint32_t op_attr_mask;
    std::uint32_t flags;
    void* request;
    union {
        SendCallback send;
        ReceiveCallback receive;
    } callback;
    std::uint64_t datatype;
    void* user_data;
    void* reply_buffer;
    int memory_type;
    void* receive_info;
    void* memh;
};

constexpr std::uint64_t kReceiveIsRendezvous = 1 << 17;
struct MessageParam {
    std::uint64_t attributes;
    Endpoint reply_endpoint;
};
using MessageCallback = Status (*)(void* arg, const void* header, std::size_t header_length, void* data,
                                   std::size_t length, const MessageParam* param);

constexpr std::uint64_t kHandlerId = 1 << 0;
constexpr std::uint64_t kHandlerFlags = 1 << 1;
constexpr std::uint64_t kHandlerCallback = 1 << 2;
constexpr std::uint64_t kHandlerArg = 1 << 3;
constexpr std::uint32_t kHandlerWholeMessage = 1 << 0;
struct HandlerParam {
    std::uint64_t field_mask;
    unsigned id;
    std::uint32_t flags;
    MessageCallback callback;
    void* arg;
};

// The functions; their names in the library are those here with "ucp_" (the last one: "ucs_") before them.
struct Api {
    void (*get_version)(unsigned* major, unsigned* minor, unsigned* release);
    Status (*init_version)(unsigned major, unsigned minor, const Params*, const void* config, Context*);
    void (*cleanup)(Context);
    Status (*worker_create)(Context, const WorkerParams*, Worker*);
    void (*worker_destroy)(Worker);
    Status (*worker_query)(Worker, WorkerAttr*);
    void (*worker_release_address)(Worker, void* address);
    unsigned (*worker_progress)(Worker);
    Status (*worker_get_efd)(Worker, int* fd);
    Status (*worker_arm)(Worker);
    Status (*worker_set_am_recv_handler)(Worker, const HandlerParam*);
    Status (*ep_create)(Worker, const EndpointParams*, Endpoint*);
    Request (*ep_close_nbx)(Endpoint, const RequestParam*);
    Request (*am_send_nbx)(Endpoint, unsigned id, const void* header, std::size_t header_length, const void* buffer,
                           std::size_t count, const RequestParam*);
    Request (*am_recv_data_nbx)(Worker, void* descriptor, void* buffer, std::size_t count, const RequestParam*);
    Status (*ep_query)(Endpoint, EndpointAttr*);
    Request (*ep_flush_nbx)(Endpoint, const RequestParam*);
    Status (*mem_map)(Context, const MapParams*, Memory*);
    Status (*mem_unmap)(Context, Memory);
    Status (*rkey_pack)(Context, Memory, void** buffer, std::size_t* nbytes);
    void (*rkey_buffer_release)(void* buffer);
    Status (*ep_rkey_unpack)(Endpoint, const void* buffer, RemoteKey*);
    void (*rkey_destroy)(RemoteKey);
    Request (*put_nbx)(Endpoint, const void* buffer, std::size_t count, std::uint64_t remote_address, RemoteKey,
                       const RequestParam*);
    Status (*request_check_status)(void* request);
    void (*request_free)(void* request);
    const char* (*status_string)(Status);
};

// Loads the library (once per process and path; it stays loaded) and finds the functions. Throws std::runtime_error
// with the loader's sentence.
const Api& load(const std::string& path);

}  // namespace moecomm::ucp
