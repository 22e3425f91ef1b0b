// What connections ask of the system.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstring>
#include <linux/tcp.h>
#include <mutex>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <set>
#include <string>
#include <sys/socket.h>
#include <system_error>
#include <unistd.h>

namespace sparsecomm {

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline std::string text_of(int error) { return std::generic_category().message(error); }

[[noreturn]] inline void fail(const char *what) { throw std::system_error(errno, std::generic_category(), what); }

// All sockets of the process. A fork closes its copies; `mutex` is held while it is made.
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
inline int opened(int fd, const char *what) {
    if (fd < 0)
        fail(what);
    std::lock_guard<std::mutex> hold(files().mutex);
    files().open.insert(fd);
    return fd;
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
        throw std::runtime_error(address + " is no address: " + gai_strerror(code));
    socklen_t size = found->ai_addrlen;
    std::memcpy(to, found->ai_addr, size);
    freeaddrinfo(found);
    return size;
}

inline void set_option(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

inline bool info_of(int fd, tcp_info *info) {
    socklen_t size = sizeof *info;
    std::memset(info, 0, size);
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &size) == 0;
}

} // namespace sparsecomm
