// Ranks of one process that send to each other from many threads, for the sanitizers; see `test_sanitizers.py`.
#include "connections.hpp"

#include <cstdio>
#include <cstdlib>
#include <new>
#include <sys/wait.h>
#include <unistd.h>

using namespace sparsecomm;

static std::atomic<bool> no_memory{false};

void *operator new[](size_t size) {
    if (no_memory)
        throw std::bad_alloc();
    return std::malloc(size);
}
void operator delete[](void *memory) noexcept { std::free(memory); }
void operator delete[](void *memory, size_t) noexcept { std::free(memory); }

namespace {

#define CHECK(holds) ((holds) ? void() : (std::printf("line %d: %s\n", __LINE__, #holds), std::abort()))

std::vector<std::unique_ptr<Connections>> connected(int P, size_t limit, int streams) {
    std::vector<std::unique_ptr<Connections>> made;
    std::vector<int> ports;
    auto tickets = [](int a, int b) { // each is another one
        std::string made(TICKETS_BYTES, static_cast<char>(a + b));
        for (size_t i = 0; i < made.size(); i += TICKET_BYTES)
            made[i] = static_cast<char>(i / TICKET_BYTES);
        return made;
    };
    for (int rank = 0; rank < P; rank++) {
        made.push_back(std::make_unique<Connections>(rank, P, limit, streams));
        ports.push_back(made[rank]->listen("127.0.0.1"));
    }
    for (int rank = 0; rank < P; rank++) {
        for (int other = 0; other < P; other++)
            if (other != rank)
                made[rank]->set_peer(other, "127.0.0.1", ports[other], tickets(rank, other));
        made[rank]->start(100);
    }
    return made;
}

char letter(int64_t number) { return static_cast<char>('0' + number % 10); }

// Send so many messages to all others, and take theirs; end without waiting for anybody.
void exchange(Connections &own, int rank, int P, size_t count) {
    CHECK(own.join(60));
    std::vector<std::string> kept;
    kept.reserve(count * P);
    size_t got = 0, out = 0;
    auto take = [&](double seconds) {
        Completion found;
        if (!own.next(seconds, &found))
            return false;
        if (found.kind == SENT) {
            out--;
        } else if (found.kind == DATA) {
            for (size_t i = 0; i < found.message.total; i++)
                CHECK(found.message.memory[i] == letter(found.message.number));
            got++;
            std::free(found.message.memory);
        } else {
            CHECK(found.kind == GOODBYE);
            std::free(found.message.memory);
        }
        return true;
    };
    for (size_t i = 0; i < count; i++) {
        for (int to = 0; to < P; to++) {
            if (to == rank)
                continue;
            size_t size = (i * 7919 * (rank + 1)) % (i % 10 == 0 ? 400000 : 3000);
            kept.emplace_back(size, letter(i));
            if (own.send(to, DATA, i, kept.back().data(), size, 1 + i) == Sent::IN_FLIGHT)
                out++;
            if (i % 7 == 0)
                own.traffic(to);
            while (take(0)) {
            }
        }
    }
    while (out > 0 || got < count * (P - 1))
        take(5);
    own.close(5);
}

// A message for which there is no memory is not begun, and those after it arrive.
void without_memory() {
    auto pair = connected(2, 1 << 22, 1);
    CHECK(pair[0]->join(60) && pair[1]->join(60));
    std::string lent(60000, '0'), after(10, '1');
    no_memory = true;
    try {
        pair[0]->send(1, DATA, 0, lent.data(), lent.size(), 1);
        CHECK(false);
    } catch (const std::bad_alloc &) {
    }
    no_memory = false;
    CHECK(pair[0]->send(1, DATA, 1, after.data(), after.size(), 2) == Sent::DONE);
    Completion found;
    while (!pair[1]->next(5, &found)) {
    }
    CHECK(found.kind == DATA && found.message.number == 1 && found.message.total == 10);
    std::free(found.message.memory);
}

} // namespace

int main() {
    without_memory();
    for (int streams : {1, 5}) {
        for (size_t limit : {size_t{1000}, size_t{1} << 22}) {
            auto made = connected(3, limit, streams);
            std::vector<std::thread> ranks;
            for (int rank = 0; rank < 3; rank++)
                ranks.emplace_back([&, rank] { exchange(*made[rank], rank, 3, 60); });
            for (int i = 0; i < 20; i++) { // each has sockets of ranks for a moment
                pid_t child = fork();
                if (child == 0)
                    _exit(0);
                waitpid(child, nullptr, 0);
            }
            for (auto &rank : ranks)
                rank.join();
        }
    }
    std::puts("passed");
}
