// Compiles only if what csrc/transport/ucp_api.h declares is what UCX's own headers say. Not part of the driver.
#include <ucp/api/ucp.h>

#include <type_traits>

#include "transport/ucp_api.h"

namespace ucp = moecomm::ucp;

// A structure may have grown at its end: the mask of fields tells UCX which ones it was given.
#define SAME_FIELD(ours, our_field, theirs, their_field)                                                      \
    static_assert(offsetof(ucp::ours, our_field) == offsetof(theirs, their_field), #theirs "." #their_field); \
    static_assert(sizeof(ucp::ours::our_field) == sizeof(theirs::their_field), #theirs "." #their_field)
#define SAME_VALUE(ours, theirs) static_assert(static_cast<long>(ucp::ours) == static_cast<long>(theirs), #theirs)

static_assert(sizeof(ucp::Status) == sizeof(ucs_status_t), "ucs_status_t");
SAME_VALUE(kOk, UCS_OK);
SAME_VALUE(kInProgress, UCS_INPROGRESS);
SAME_VALUE(kErrorBusy, UCS_ERR_BUSY);
SAME_VALUE(kErrorLast, UCS_ERR_LAST);

SAME_FIELD(Params, field_mask, ucp_params_t, field_mask);
SAME_FIELD(Params, features, ucp_params_t, features);
SAME_FIELD(Params, estimated_num_eps, ucp_params_t, estimated_num_eps);
static_assert(sizeof(ucp::Params) <= sizeof(ucp_params_t), "ucp_params_t");
SAME_VALUE(kParamsFeatures, UCP_PARAM_FIELD_FEATURES);
SAME_VALUE(kParamsNumEndpoints, UCP_PARAM_FIELD_ESTIMATED_NUM_EPS);
SAME_VALUE(kFeatureOneSided, UCP_FEATURE_RMA);
SAME_VALUE(kFeatureWakeup, UCP_FEATURE_WAKEUP);
SAME_VALUE(kFeatureActiveMessages, UCP_FEATURE_AM);

SAME_FIELD(WorkerParams, field_mask, ucp_worker_params_t, field_mask);
SAME_FIELD(WorkerParams, thread_mode, ucp_worker_params_t, thread_mode);
static_assert(sizeof(ucp::WorkerParams) == sizeof(ucp_worker_params_t), "ucp_worker_params_t");
SAME_VALUE(kWorkerThreadMode, UCP_WORKER_PARAM_FIELD_THREAD_MODE);
SAME_VALUE(kThreadModeSerialized, UCS_THREAD_MODE_SERIALIZED);

SAME_FIELD(WorkerAttr, field_mask, ucp_worker_attr_t, field_mask);
SAME_FIELD(WorkerAttr, address, ucp_worker_attr_t, address);
SAME_FIELD(WorkerAttr, address_length, ucp_worker_attr_t, address_length);
SAME_FIELD(WorkerAttr, max_am_header, ucp_worker_attr_t, max_am_header);
// UCX writes into this one, but only the fields that are asked for.
static_assert(sizeof(ucp::WorkerAttr) == sizeof(ucp_worker_attr_t), "ucp_worker_attr_t");
SAME_VALUE(kWorkerAttrAddress, UCP_WORKER_ATTR_FIELD_ADDRESS);
SAME_VALUE(kWorkerAttrMaxHeader, UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER);

SAME_FIELD(EndpointParams, field_mask, ucp_ep_params_t, field_mask);
SAME_FIELD(EndpointParams, address, ucp_ep_params_t, address);
SAME_FIELD(EndpointParams, err_mode, ucp_ep_params_t, err_mode);
SAME_FIELD(EndpointParams, err_handler.callback, ucp_ep_params_t, err_handler.cb);
SAME_FIELD(EndpointParams, err_handler.arg, ucp_ep_params_t, err_handler.arg);
static_assert(sizeof(ucp::EndpointParams) == sizeof(ucp_ep_params_t), "ucp_ep_params_t");
SAME_VALUE(kEndpointRemoteAddress, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
SAME_VALUE(kEndpointErrorMode, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
SAME_VALUE(kEndpointErrorHandler, UCP_EP_PARAM_FIELD_ERR_HANDLER);
SAME_VALUE(kErrorModePeer, UCP_ERR_HANDLING_MODE_PEER);

SAME_FIELD(Lane, transport_name, ucp_transport_entry_t, transport_name);
SAME_FIELD(Lane, device_name, ucp_transport_entry_t, device_name);
SAME_FIELD(Lanes, entries, ucp_transports_t, entries);
SAME_FIELD(Lanes, num_entries, ucp_transports_t, num_entries);
SAME_FIELD(Lanes, entry_size, ucp_transports_t, entry_size);
static_assert(sizeof(ucp::Lanes) == sizeof(ucp_transports_t), "ucp_transports_t");
SAME_FIELD(EndpointAttr, field_mask, ucp_ep_attr_t, field_mask);
SAME_FIELD(EndpointAttr, name, ucp_ep_attr_t, name);
SAME_FIELD(EndpointAttr, local_sockaddr, ucp_ep_attr_t, local_sockaddr);
SAME_FIELD(EndpointAttr, remote_sockaddr, ucp_ep_attr_t, remote_sockaddr);
SAME_FIELD(EndpointAttr, transports, ucp_ep_attr_t, transports);
// UCX writes into this one, too.
static_assert(sizeof(ucp::EndpointAttr) == sizeof(ucp_ep_attr_t), "ucp_ep_attr_t");
SAME_VALUE(kEndpointAttrLanes, UCP_EP_ATTR_FIELD_TRANSPORTS);

SAME_FIELD(MapParams, field_mask, ucp_mem_map_params_t, field_mask);
SAME_FIELD(MapParams, address, ucp_mem_map_params_t, address);
SAME_FIELD(MapParams, length, ucp_mem_map_params_t, length);
static_assert(sizeof(ucp::MapParams) <= sizeof(ucp_mem_map_params_t), "ucp_mem_map_params_t");
SAME_VALUE(kMapAddress, UCP_MEM_MAP_PARAM_FIELD_ADDRESS);
SAME_VALUE(kMapLength, UCP_MEM_MAP_PARAM_FIELD_LENGTH);

SAME_FIELD(RequestParam, op_attr_mask, ucp_request_param_t, op_attr_mask);
SAME_FIELD(RequestParam, flags, ucp_request_param_t, flags);
SAME_FIELD(RequestParam, callback.send, ucp_request_param_t, cb.send);
SAME_FIELD(RequestParam, callback.receive, ucp_request_param_t, cb.recv_am);
SAME_FIELD(RequestParam, user_data, ucp_request_param_t, user_data);
static_assert(sizeof(ucp::RequestParam) <= sizeof(ucp_request_param_t), "ucp_request_param_t");
SAME_VALUE(kOpCallback, UCP_OP_ATTR_FIELD_CALLBACK);
SAME_VALUE(kOpUserData, UCP_OP_ATTR_FIELD_USER_DATA);
SAME_VALUE(kOpFlags, UCP_OP_ATTR_FIELD_FLAGS);
SAME_VALUE(kCloseForce, UCP_EP_CLOSE_FLAG_FORCE);

SAME_FIELD(MessageParam, attributes, ucp_am_recv_param_t, recv_attr);
SAME_VALUE(kReceiveIsRendezvous, UCP_AM_RECV_ATTR_FLAG_RNDV);

SAME_FIELD(HandlerParam, field_mask, ucp_am_handler_param_t, field_mask);
SAME_FIELD(HandlerParam, id, ucp_am_handler_param_t, id);
SAME_FIELD(HandlerParam, flags, ucp_am_handler_param_t, flags);
SAME_FIELD(HandlerParam, callback, ucp_am_handler_param_t, cb);
SAME_FIELD(HandlerParam, arg, ucp_am_handler_param_t, arg);
static_assert(sizeof(ucp::HandlerParam) == sizeof(ucp_am_handler_param_t), "ucp_am_handler_param_t");
SAME_VALUE(kHandlerId, UCP_AM_HANDLER_PARAM_FIELD_ID);
SAME_VALUE(kHandlerFlags, UCP_AM_HANDLER_PARAM_FIELD_FLAGS);
SAME_VALUE(kHandlerCallback, UCP_AM_HANDLER_PARAM_FIELD_CB);
SAME_VALUE(kHandlerArg, UCP_AM_HANDLER_PARAM_FIELD_ARG);
SAME_VALUE(kHandlerWholeMessage, UCP_AM_FLAG_WHOLE_MSG);

// Same number of arguments; handles are pointers on both sides.
template <class... Ours, class Result, class Theirs, class... Rest>
constexpr bool same_arity(Result (*)(Ours...), Theirs (*)(Rest...)) {
    return sizeof...(Ours) == sizeof...(Rest) && sizeof(Result) == sizeof(Theirs);
}
#define SAME_CALL(name) static_assert(same_arity(decltype(ucp::Api::name){}, decltype(&ucp_##name){}), #name)
SAME_CALL(init_version);
SAME_CALL(worker_create);
SAME_CALL(worker_query);
SAME_CALL(worker_progress);
SAME_CALL(worker_get_efd);
SAME_CALL(worker_arm);
SAME_CALL(worker_set_am_recv_handler);
SAME_CALL(ep_create);
SAME_CALL(ep_close_nbx);
SAME_CALL(am_send_nbx);
SAME_CALL(am_recv_data_nbx);
SAME_CALL(ep_query);
SAME_CALL(ep_flush_nbx);
SAME_CALL(mem_map);
SAME_CALL(mem_unmap);
SAME_CALL(rkey_pack);
SAME_CALL(ep_rkey_unpack);
SAME_CALL(put_nbx);
SAME_CALL(request_check_status);
