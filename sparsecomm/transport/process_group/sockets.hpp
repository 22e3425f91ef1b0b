// System calls for connections.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstring>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <mutex>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <set>
#include <string>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <system_error>
#include <unistd.h>

namespace sparsecomm {

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline std::string error_text(int error) { return std::generic_category().message(error); }

[[noreturn]] inline void throw_errno(const char *what) { throw std::system_error(errno, std::generic_category(), what); }

// All open files of this module. A forked process closes its copies. `mutex` is held while forking or opening a file.
struct Files {
    std::mutex mutex;
    std::set<int> open;
};
inline Files &files() {
    static Files *all = [] {
        pthread_atfork([] { files().mutex.lock(); }, [] { files().mutex.unlock(); },
                       [] {
                           for (int fd : files().open)
                               ::close(fd);
                           files().open.clear();
                           files().mutex.unlock();
                       });
        return new Files;
    }();
    return *all;
}
// Call `open()`, which returns a file or -1 with errno, and register the file.
template <typename Open> int open_file(const Open &open) {
    std::lock_guard<std::mutex> hold(files().mutex);
    int fd = open();
    if (fd >= 0)
        files().open.insert(fd);
    return fd;
}
template <typename Open> int open_or_throw(const char *what, const Open &open) {
    int fd = open_file(open);
    if (fd < 0)
        throw_errno(what);
    return fd;
}
inline int open_socket(int family) {
    return open_file([&] { return socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
}
inline void close_file(int fd) {
    if (fd < 0)
        return;
    std::lock_guard<std::mutex> hold(files().mutex);
    if (files().open.erase(fd))
        ::close(fd);
}

inline socklen_t resolve(const std::string &address, int port, sockaddr_storage *to) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    if (int code = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found))
        throw std::runtime_error(address + " is not an address: " + gai_strerror(code));
    socklen_t size = found->ai_addrlen;
    std::memcpy(to, found->ai_addr, size);
    freeaddrinfo(found);
    return size;
}

inline void set_option(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

inline bool get_tcp_info(int fd, tcp_info *info) {
    socklen_t size = sizeof *info;
    std::memset(info, 0, size);
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &size) == 0;
}

// Return the number of unacknowledged bytes on a connection that was shut down for writing.
inline int unacknowledged(int fd) {
    constexpr int FIN_WAIT1 = 4, LAST_ACK = 9, CLOSING = 11; // states of TCP, as numbered by Linux
    tcp_info info;
    int bytes = 0;
    bool waits = get_tcp_info(fd, &info) &&
                 (info.tcpi_state == FIN_WAIT1 || info.tcpi_state == LAST_ACK || info.tcpi_state == CLOSING);
    return waits && ioctl(fd, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

} // namespace sparsecomm
