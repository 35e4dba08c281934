#include "sync/process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace moecomm {
namespace {

// Fields 3 (state) and 22 (start time) of /proc/<pid>/stat, proc(5). False if there is no such process; what cannot be
// found out (no descriptor is free, say) leaves the fields as they are.
bool read_stat(int pid, char& state, std::uint64_t& start_time) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return errno != ENOENT && errno != ESRCH;
    char text[1024];
    const std::size_t length = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    text[length] = '\0';
    // The command name (field 2) may hold blanks and parentheses, so count from the last closing one.
    const char* rest = std::strrchr(text, ')');
    if (rest == nullptr) return false;
    unsigned long long start = 0;
    if (std::sscanf(rest + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                    &state, &start) != 2)
        return false;
    start_time = start;
    return true;
}

}  // namespace

PeerProcess::PeerProcess(int pid) : pid_(pid) {
    if (pid_ <= 0) return;
#ifdef SYS_pidfd_open
    pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
#endif
    char state = '?';
    if (pidfd_ < 0) read_stat(pid_, state, start_time_);
}

PeerProcess::PeerProcess(PeerProcess&& other) noexcept
    : pid_(other.pid_), pidfd_(other.pidfd_), start_time_(other.start_time_) {
    other.pidfd_ = -1;
}

PeerProcess::~PeerProcess() {
    if (pidfd_ >= 0) close(pidfd_);
}

bool PeerProcess::alive() const {
    if (pid_ <= 0) return true;
    if (pidfd_ >= 0) {
        pollfd entry{pidfd_, POLLIN, 0};
        return poll(&entry, 1, 0) < 1;
    }
    char state = '?';
    std::uint64_t start_time = start_time_;
    if (!read_stat(pid_, state, start_time)) return false;
    return state != 'Z' && state != 'X' && (start_time_ == 0 || start_time == start_time_);
}

}  // namespace moecomm
