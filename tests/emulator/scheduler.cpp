// The scheduler of the emulated device.
//
// Every CUDA thread is a fiber. A fiber runs until it must wait: at a barrier, in a warp operation, before a word that
// another block writes, or at random at an atomic. A seeded scheduler then picks another. What a GPU would do silently
// wrong is an error here: warp operations whose lanes do not meet, barriers that some threads have passed by, waits
// that nobody ends, writes behind the end of shared memory (with AddressSanitizer). Shared memory starts as garbage.
// It cannot see faults of memory order: every store is seen at once. Each thread of the host has its own device.
#include "emulator.hpp"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifndef __x86_64__
#include <ucontext.h>
#endif

#ifdef __x86_64__
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#endif

namespace emulator {

__thread Position position = {nullptr, nullptr, {0}, {0}};

namespace {

constexpr size_t STACK = 64 << 10;
constexpr unsigned NONE = ~0u;
constexpr long PATIENCE = 400000;  // pauses and idle turns, while nothing happens, until a wait counts as endless

// -- fibers ------------------------------------------------------------------------------------------------------

struct Context {
#ifdef __x86_64__
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
};

struct Block;

struct Thread {
    Context context;
    std::unique_ptr<char[]> stack;
    Block* block = nullptr;
    Index index{0};
    State state = State::ready;
    const char* operation = "";  // the warp operation in which it waits
    unsigned mask = 0;
    uint64_t given = 0, got = 0;
    unsigned source = 0;
};

struct Block {
    Index index{0};
    std::vector<Thread> threads;
    std::map<const void*, std::unique_ptr<void, decltype(&std::free)>> shared;  // by the address of the declaration
    size_t live = 0;
    unsigned slow = NONE;  // the warp that gets few turns for a while
};

struct Machine {
    Thread* current = nullptr;
    Context scheduler;
    uint64_t random = 0;
    void (*body)(void*) = nullptr;
    void* arguments = nullptr;
    std::vector<std::unique_ptr<char[]>> stacks;  // free ones
    std::string error;
    long idle = 0;  // see PATIENCE
#ifdef __SANITIZE_ADDRESS__
    void* fake_stack = nullptr;
    const void* bottom = nullptr;
    size_t size = 0;
#endif
};

thread_local Machine machine;

std::string position_of(const Thread& t) {
    return "block " + std::to_string(t.block->index.x) + ", thread " + std::to_string(t.index.x);
}

void to_scheduler() {
    Thread* self = machine.current;
#ifdef __SANITIZE_ADDRESS__
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(self->state == State::done ? nullptr : &fake, machine.bottom, machine.size);
#endif
#ifdef __x86_64__
    emulator_switch(&self->context.stack_pointer, machine.scheduler.stack_pointer);
#else
    swapcontext(&self->context.context, &machine.scheduler.context);
#endif
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake, &machine.bottom, &machine.size);
#endif
}

void to_fiber(Thread& t) {
    machine.current = &t;
    position.thread = &t.index, position.block = &t.block->index;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&machine.fake_stack, t.stack.get(), STACK);
#endif
#ifdef __x86_64__
    emulator_switch(&machine.scheduler.stack_pointer, t.context.stack_pointer);
#else
    swapcontext(&machine.scheduler.context, &t.context.context);
#endif
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(machine.fake_stack, nullptr, nullptr);
#endif
}

void entry() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &machine.bottom, &machine.size);
#endif
    machine.body(machine.arguments);
    machine.current->state = State::done;
    to_scheduler();
    std::abort();
}

void prepare(Thread& t) {
    if (t.stack == nullptr) {
        if (machine.stacks.empty()) machine.stacks.emplace_back(new char[STACK]);
        t.stack = std::move(machine.stacks.back());
        machine.stacks.pop_back();
    }
#ifdef __x86_64__
    void** top = reinterpret_cast<void**>(t.stack.get() + STACK);
    *--top = nullptr;  // keeps the stack aligned as a call would leave it
    *--top = reinterpret_cast<void*>(&entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    t.context.stack_pointer = top;
#else
    getcontext(&t.context.context);
    t.context.context.uc_stack = {t.stack.get(), 0, STACK};
    t.context.context.uc_link = nullptr;
    makecontext(&t.context.context, &entry, 0);
#endif
    t.state = State::ready;
}

// -- warps -------------------------------------------------------------------------------------------------------

std::string hex(unsigned v) {
    char text[16];
    std::snprintf(text, sizeof text, "%08x", v);
    return text;
}

// If all lanes that `t` names wait in the same operation, give each its answer. Errors are what makes that impossible.
bool try_warp(Block& b, Thread& t) {
    const size_t first = t.index.x / LANES * LANES;
    for (int lane = 0; lane < LANES; lane++) {
        if (!(t.mask >> lane & 1)) continue;
        const auto complain = [&](const std::string& what) {
            if (machine.error.empty())
                machine.error = position_of(t) + ": " + t.operation + " with mask " + hex(t.mask) + " names lane " +
                                std::to_string(lane) + ", " + what;
        };
        if (first + lane >= b.threads.size()) return complain("which does not exist"), false;
        const Thread& other = b.threads[first + lane];
        if (other.state == State::done) return complain("which has ended"), false;
        if (other.state == State::barrier) return complain("which waits at __syncthreads"), false;
        if (other.state != State::warp) return false;
        if (other.mask != t.mask || std::strcmp(other.operation, t.operation))
            return complain(std::string("which is in ") + other.operation + " with mask " + hex(other.mask)), false;
    }
    uint64_t given[LANES] = {};
    uint64_t ballot = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (t.mask >> lane & 1) {
            given[lane] = b.threads[first + lane].given;
            if (given[lane] & 1) ballot |= 1ull << lane;
        }
    const unsigned mask = t.mask;
    const bool shuffles = !std::strcmp(t.operation, "a shuffle");
    for (int lane = 0; lane < LANES; lane++)
        if (mask >> lane & 1) {
            Thread& other = b.threads[first + lane];
            other.got = shuffles ? given[other.source % LANES] : ballot;
            other.state = State::ready;
        }
    return true;
}

// -- the scheduler -----------------------------------------------------------------------------------------------

void run(unsigned grid, unsigned block, unsigned resident) {
    position.threads = {block}, position.blocks = {grid};
    machine.error.clear();
    machine.idle = 0;
    std::vector<std::unique_ptr<Block>> running;
    unsigned next = 0;
    const auto begin = [&](Block& b) {
        b.index = {next++};
        b.threads.resize(block);
        b.shared.clear();
        b.live = block;
        for (unsigned i = 0; i < block; i++) {
            b.threads[i].block = &b;
            b.threads[i].index = {i};
            prepare(b.threads[i]);
        }
    };
    while (next < grid && running.size() < resident) {
        running.push_back(std::make_unique<Block>());
        begin(*running.back());
    }
    while (!running.empty() && machine.error.empty()) {
        const size_t which = emulator::random() % running.size();
        Block& b = *running[which];
        const unsigned warps = (block + LANES - 1) / LANES, first = unsigned(emulator::random() % warps);
        bool progress = false, whole = true;
        if (emulator::random() % 32 == 0) b.slow = warps > 1 ? unsigned(emulator::random() % warps) : NONE;
        size_t waiting = 0;
        for (unsigned w = 0; w < warps && machine.error.empty(); w++) {
            const unsigned begins = (first + w) % warps * LANES, turn = unsigned(emulator::random() % LANES);
            if (begins / LANES == b.slow && emulator::random() % 16) {  // others run far ahead of this warp
                whole = false;
                continue;
            }
            for (int l = 0; l < LANES && machine.error.empty(); l++) {
                const unsigned i = begins + (turn + l) % LANES;
                if (i >= block) continue;
                Thread& t = b.threads[i];
                if (t.state == State::spinning) t.state = State::ready;
                if (t.state == State::ready) {
                    to_fiber(t);
                    progress = true;
                    if (t.state == State::done) b.live--, machine.idle = 0;
                }
                if (t.state == State::warp && machine.error.empty() && try_warp(b, t)) progress = true;
            }
        }
        if (!machine.error.empty()) break;
        for (const Thread& t : b.threads) waiting += t.state == State::barrier;
        if (waiting && waiting == b.live) {
            if (b.live < block) {
                for (const Thread& t : b.threads)
                    if (t.state == State::done) machine.error = position_of(t) + " has ended, and others wait at __syncthreads";
                break;
            }
            for (Thread& t : b.threads) t.state = State::ready;
            machine.idle = 0;
            progress = true;
        }
        if (b.live == 0) {
            progress = true;
            if (next < grid) {
                begin(b);
            } else {
                for (Thread& t : b.threads) machine.stacks.push_back(std::move(t.stack));
                running.erase(running.begin() + long(which));
            }
        }
        machine.idle += whole && !progress;
        if (machine.idle > PATIENCE) {
            for (const Thread& t : b.threads)
                if (t.state != State::done && machine.error.empty())
                    machine.error = position_of(t) + " waits forever " +
                                    (t.state == State::barrier    ? std::string("at __syncthreads")
                                     : t.state == State::warp     ? std::string("in ") + t.operation
                                                                  : std::string("for a word in memory"));
        }
    }
    for (auto& b : running)
        for (Thread& t : b->threads) machine.stacks.push_back(std::move(t.stack));  // abandoned fibers own at most the text of an error
}

}  // namespace

// -- for kernels -------------------------------------------------------------------------------------------------

uint64_t random() {  // xorshift64*
    uint64_t& s = machine.random;
    s ^= s >> 12, s ^= s << 25, s ^= s >> 27;
    return s * 0x2545f4914f6cdd1dull;
}

void made_progress() { machine.idle = 0; }

void wait_as(State state) {
    machine.current->state = state;
    to_scheduler();
}

void fail(const char* text) {
    if (machine.error.empty()) machine.error = position_of(*machine.current) + ": " + text;
    machine.current->state = State::done;
    to_scheduler();
    std::abort();
}

void spin() {
    machine.idle++;
    wait_as(State::spinning);
}

uint64_t warp(const char* operation, unsigned mask, uint64_t given, unsigned source) {
    Thread* self = machine.current;
    if (!(mask >> (self->index.x % LANES) & 1))
        fail((std::string(operation) + " with mask " + hex(mask) + " without itself").c_str());
    self->operation = operation, self->mask = mask, self->given = given, self->source = source;
    wait_as(State::warp);
    return self->got;
}

void* shared_memory(const void* declaration, size_t nbytes, size_t alignment) {
    auto& all = machine.current->block->shared;
    auto found = all.find(declaration);
    if (found == all.end()) {
        void* memory = nullptr;
        if (posix_memalign(&memory, alignment > 16 ? alignment : 16, nbytes)) fail("no shared memory");
        std::memset(memory, 0xA5, nbytes);
        found = all.emplace(declaration, std::unique_ptr<void, decltype(&std::free)>(memory, &std::free)).first;
    }
    return found->second.get();
}

int launch(void (*body)(void*), void* arguments, unsigned grid, unsigned block, unsigned resident, uint64_t seed, char* error,
           size_t room) {
    machine.body = body, machine.arguments = arguments;
    machine.random = seed * 0x9e3779b97f4a7c15ull + 1;
    try {
        run(grid, block, resident);
    } catch (const std::exception& problem) {
        machine.error = problem.what();
    }
    std::snprintf(error, room, "%s", machine.error.c_str());
    return machine.error.empty() ? 0 : 1;
}

}  // namespace emulator
