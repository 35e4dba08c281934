// Whether another process of this host still lives.
#pragma once

#include <cstdint>

namespace moecomm {

class PeerProcess {
  public:
    // pid <= 0: a peer inside this process, which lives as long as we do.
    explicit PeerProcess(int pid);
    ~PeerProcess();
    PeerProcess(PeerProcess&& other) noexcept;
    PeerProcess(const PeerProcess&) = delete;
    PeerProcess& operator=(const PeerProcess&) = delete;

    // A process that has ended but was not yet reaped by its parent counts as dead.
    bool alive() const;
    int pid() const { return pid_; }

  private:
    int pid_;
    int pidfd_ = -1;                // where the kernel has them
    std::uint64_t start_time_ = 0;  // otherwise: tells a reused process id from the process we met
};

}  // namespace moecomm
