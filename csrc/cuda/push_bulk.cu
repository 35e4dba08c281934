// Sends rows to where their routes say, through the bulk copy engine: each row is read once into shared memory and
// written from there to all its destinations. One warp is a block; it keeps several pieces of rows in flight:
//
//     piece i:  stage i % kStages     load .......... arrived, stores to all destinations ....... read
//     the load of piece i + kAhead starts when the stores of piece i - kBehind have read that stage.
#include <bulk_copy.cuh>

namespace moecomm {

constexpr int kRowBits = 40;  // as in moecomm/kernels/base.py
constexpr int kFailed = 0;    // as in moecomm/kernels/triton/lanes.py
constexpr int kStages = 4;
constexpr int kBehind = 2;
constexpr int kAhead = kStages - kBehind;
constexpr int kHeader = 128;  // bytes in front of the stages, for the arrivals

struct Piece {
    long long token;
    long long offset;  // in its row
    unsigned bytes;
};

// The pieces of this block: those of token blockIdx.x, then of token blockIdx.x + gridDim.x, ...
__device__ Piece piece_of(long long i, long long row_bytes, long long piece_bytes) {
    const long long per_row = (row_bytes + piece_bytes - 1) / piece_bytes;
    const long long offset = i % per_row * piece_bytes;
    const long long rest = row_bytes - offset;
    return {blockIdx.x + i / per_row * gridDim.x, offset,
            static_cast<unsigned>(rest < piece_bytes ? rest : piece_bytes)};
}

__device__ char* row_at(long long route, const long long* addresses, long long row_bytes) {
    const long long row = route & ((1ll << kRowBits) - 1);
    return reinterpret_cast<char*>(addresses[route >> kRowBits]) + row * row_bytes;
}

template <typename Unit>
__device__ void copy_units(char* to, const char* from, long long bytes, int first, int step) {
    for (long long i = first; i < bytes / static_cast<long long>(sizeof(Unit)); i += step) {
        reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
    }
}

// What the engine cannot do: by `step` threads, of which this is number `first`, in the widest units that fit.
__device__ void copy_plainly(char* to, const char* from, long long bytes, int first, int step) {
    const unsigned long long all =
        reinterpret_cast<unsigned long long>(to) | reinterpret_cast<unsigned long long>(from) | bytes;
    if (all % 8 == 0) {
        copy_units<unsigned long long>(to, from, bytes, first, step);
    } else if (all % 4 == 0) {
        copy_units<unsigned>(to, from, bytes, first, step);
    } else if (all % 2 == 0) {
        copy_units<unsigned short>(to, from, bytes, first, step);
    } else {
        copy_units<unsigned char>(to, from, bytes, first, step);
    }
}

}  // namespace moecomm

// rows: address of row 0; row_stride, row_bytes: in bytes; routes [num_tokens, num_slots], see moecomm/kernels/base.py;
// addresses: of row 0, by rank; piece_bytes: a multiple of 16; status: null, or as in moecomm/kernels/triton/lanes.py:
// once a wait of an earlier kernel has failed nothing is written. Shared memory: kHeader + kStages * piece_bytes.
extern "C" __global__ void __launch_bounds__(32)
    push_bulk(const char* rows, long long row_stride, long long num_tokens, long long row_bytes,
              const long long* routes, long long num_slots, const long long* addresses, long long piece_bytes,
              const long long* status) {
    using namespace moecomm;
    const int lane = threadIdx.x;
    if (blockIdx.x >= num_tokens || row_bytes == 0) return;
    if (status != nullptr && status[kFailed] != 0) return;

    if ((reinterpret_cast<unsigned long long>(rows) | row_stride | row_bytes) % 16 != 0) {
        for (long long t = blockIdx.x; t < num_tokens; t += gridDim.x) {
            for (long long p = 0; p < num_slots; ++p) {
                const long long route = routes[t * num_slots + p];
                if (route < 0) continue;
                copy_plainly(row_at(route, addresses, row_bytes), rows + t * row_stride, row_bytes, lane, kWarp);
            }
        }
        return;
    }

    unsigned char* const shared = shared_memory();
    Arrival* const arrivals = reinterpret_cast<Arrival*>(shared);
    const long long num_own = (num_tokens - blockIdx.x + gridDim.x - 1) / gridDim.x;
    const long long num_pieces = num_own * ((row_bytes + piece_bytes - 1) / piece_bytes);
    const auto load = [=](long long i) {
        const Piece piece = piece_of(i, row_bytes, piece_bytes);
        const int stage = static_cast<int>(i % kStages);
        bulk_load(shared + kHeader + stage * piece_bytes, rows + piece.token * row_stride + piece.offset, piece.bytes,
                  arrivals + stage);
    };

    if (lane == 0) {
        for (int stage = 0; stage < kStages; ++stage) arrival_init(arrivals + stage);
        arrivals_ready();
        for (long long i = 0; i < kAhead && i < num_pieces; ++i) load(i);
    }
    __syncwarp();

    for (long long i = 0; i < num_pieces; ++i) {
        const Piece piece = piece_of(i, row_bytes, piece_bytes);
        const int stage = static_cast<int>(i % kStages);
        const unsigned char* const buffer = shared + kHeader + stage * piece_bytes;
        while (!arrival_ended(arrivals + stage, static_cast<unsigned>(i / kStages % 2))) {
        }
        for (long long p = lane; p < num_slots; p += kWarp) {
            const long long route = routes[piece.token * num_slots + p];
            if (route < 0) continue;
            char* const to = row_at(route, addresses, row_bytes) + piece.offset;
            if (reinterpret_cast<unsigned long long>(to) % 16 == 0) {
                bulk_store(to, buffer, piece.bytes);
            } else {
                copy_plainly(to, reinterpret_cast<const char*>(buffer), piece.bytes, 0, 1);
                shared_before_bulk();
            }
        }
        bulk_commit();
        if (i + kAhead < num_pieces) {
            bulk_wait_read<kBehind>();
            __syncwarp();  // lane 0 starts the load for all
            if (lane == 0) load(i + kAhead);
        }
    }
    bulk_wait();
}
