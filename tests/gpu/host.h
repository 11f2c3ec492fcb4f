// Enough of CUDA C++ to run kernels on the host, one block after another: what differs from a GPU is
// the order in which threads run, never what they compute.
//
// Each thread of a block is a context of its own that runs until it has to wait for others, at a
// barrier or a warp's exchange of values. The order in which threads take turns is an argument, so
// that a missing barrier shows as a difference between two orders.

#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define RINGLET_ON_HOST
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct uint3_ { unsigned x, y, z; };
static uint3_ threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

template <class To, class From> static inline To bit_cast_(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline unsigned __float_as_uint(float v) { return bit_cast_<unsigned>(v); }
static inline float __uint_as_float(unsigned v) { return bit_cast_<float>(v); }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline int __ffs(int v) { return __builtin_ffs(v); }

static inline unsigned short rounded_to_f16(float v) { return bit_cast_<unsigned short>((_Float16)v); }
static inline float widened_from_f16(unsigned short v) { return (float)bit_cast_<_Float16>(v); }

// -- threads ---------------------------------------------------------------------------------------

namespace host {
struct Fiber {
    ucontext_t context;  // of its first turn; from then on a jump is enough, and much faster
    jmp_buf place;
    std::vector<char> stack = std::vector<char>(64 << 10);
    bool started = false, done = false;
};
static std::vector<Fiber*> fibers;
static jmp_buf scheduler;
static unsigned current, live, turns;
static void (*body)(const void*);
static const void* argument;

struct Barrier {
    unsigned arrived = 0, generation = 0;
};
static Barrier block_barrier;
static std::vector<Barrier> warp_barriers;
static std::vector<unsigned long long> slots;

static void yield() {
    if (!_setjmp(fibers[current]->place)) _longjmp(scheduler, 1);
}

static void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

static void wait(Barrier& barrier, unsigned expected) {
    const unsigned me = current, generation = barrier.generation;
    turns = 0;
    if (++barrier.arrived == expected) {
        barrier.arrived = 0, ++barrier.generation;
    } else {
        while (barrier.generation == generation) yield();
    }
    current = me, threadIdx.x = me;
}

static unsigned warp_size() {
    const unsigned first = current / 32 * 32;
    return blockDim.x - first < 32 ? blockDim.x - first : 32;
}

static void sync_warp() { wait(warp_barriers[current / 32], warp_size()); }

static void enter() {
    for (;;) {  // a block after the other
        body(argument);
        fibers[current]->done = true, --live;
        yield();
    }
}

static Fiber* fiber() {
    Fiber* made = new Fiber;
    getcontext(&made->context);
    made->context.uc_stack.ss_sp = made->stack.data();
    made->context.uc_stack.ss_size = made->stack.size();
    made->context.uc_link = nullptr;
    makecontext(&made->context, enter, 0);
    return made;
}

template <class T> T exchange(T value, unsigned from) {
    static_assert(sizeof(T) <= 8);
    memcpy(&slots[current], &value, sizeof value);
    sync_warp();
    T got;
    memcpy(&got, &slots[from], sizeof got);
    sync_warp();
    return got;
}

static void run(unsigned blocks, unsigned threads, int backwards) {
    while (fibers.size() < threads) fibers.push_back(fiber());
    gridDim = {blocks, 1, 1}, blockDim = {threads, 1, 1};
    for (unsigned block = 0; block < blocks; ++block) {
        blockIdx = {block, 0, 0};
        block_barrier = {}, warp_barriers.assign((threads + 31) / 32, {}), slots.assign(threads, 0);
        for (unsigned t = 0; t < threads; ++t) fibers[t]->done = false;
        for (live = threads, turns = 0; live;) {
            for (unsigned t = 0; t < threads; ++t) {
                const unsigned next = backwards ? threads - 1 - t : t;
                if (fibers[next]->done) continue;
                current = next, threadIdx = {next, 0, 0};
                resume(*fibers[next]);
            }
            if (++turns > 8) {
                fprintf(stderr, "threads wait for each other in block %u\n", block);
                abort();
            }
        }
    }
}

template <class T> struct Kernel {
    static inline void (*function)(T);
    static void call(const void* bytes) {
        T copy;
        memcpy(&copy, bytes, sizeof copy);
        function(copy);
    }
};

template <class T>
void launch(void (*kernel)(T), unsigned blocks, unsigned threads, const void* bytes, int backwards) {
    Kernel<T>::function = kernel, body = Kernel<T>::call, argument = bytes;
    run(blocks, threads, backwards);
}
}  // namespace host

static inline void __syncthreads() { host::wait(host::block_barrier, blockDim.x); }
static inline void __syncwarp(unsigned = ~0u) { host::sync_warp(); }
static inline void __threadfence() {}

template <class T> T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
    const unsigned me = host::current, other = me ^ (unsigned)mask;
    return host::exchange(value, other / width == me / width ? other : me);
}
template <class T> T __shfl_sync(unsigned, T value, int lane, int width = 32) {
    return host::exchange(value, host::current / width * width + (unsigned)lane % width);
}
template <class T> T __shfl_up_sync(unsigned, T value, unsigned by, int width = 32) {
    const unsigned me = host::current;
    return host::exchange(value, me % width < by ? me : me - by);
}
template <class T> T __shfl_down_sync(unsigned, T value, unsigned by, int width = 32) {
    const unsigned me = host::current;
    return host::exchange(value, me % width + by < (unsigned)width ? me + by : me);
}
static inline unsigned __ballot_sync(unsigned, int predicate) {
    const unsigned me = host::current, first = me / 32 * 32;
    unsigned bits = 0;
    host::slots[me] = predicate != 0;
    host::sync_warp();
    for (unsigned i = 0; i < 32 && first + i < blockDim.x; ++i)
        bits |= (unsigned)host::slots[first + i] << i;
    host::sync_warp();
    return bits;
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

template <class T, class V> T atomicAdd(T* at, V by) { T old = *at; *at = old + (T)by; return old; }
template <class T, class V> T atomicMax(T* at, V by) { T old = *at; if (old < (T)by) *at = by; return old; }
template <class T, class V> T atomicOr(T* at, V by) { T old = *at; *at = old | (T)by; return old; }
template <class T, class V> T atomicExch(T* at, V by) { T old = *at; *at = (T)by; return old; }
