// A range of address space: private to the process, or shared through an anonymous file that has no name anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace moecomm {

class Mapping {
  public:
    // Private memory; pages exist once touched.
    static std::shared_ptr<Mapping> create_private(std::size_t nbytes);
    // Memory of an anonymous file (memfd); vanishes with the last process that maps it, also after a kill -9.
    static std::shared_ptr<Mapping> create_shared(const std::string& label, std::size_t nbytes);
    // Maps the anonymous file that process `pid` holds open as descriptor `fd`. Throws std::system_error.
    static std::shared_ptr<Mapping> open_peer(int pid, int fd, std::size_t nbytes);
    // Memory that somebody else owns, such as a device's; `owner` is let go of with it. Never touched from here.
    static std::shared_ptr<Mapping> borrow(std::uint64_t address, std::size_t nbytes, std::shared_ptr<void> owner);

    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(base_); }
    std::size_t nbytes() const { return nbytes_; }
    int fd() const { return fd_; }
    // The descriptor is needed for punch(); peers need it only while they open.
    void close_fd();
    // Whether memory exists only once it is touched, and pages can be given back.
    bool is_sparse() const { return !borrowed_from_; }
    // Gives the pages of [offset, offset + nbytes) back to the system; they read as zero afterwards. Does nothing in a
    // forked child, to whom they do not belong, or with borrowed memory.
    void punch(std::size_t offset, std::size_t nbytes);
    // Pages of the mapping that are in memory, in bytes.
    std::size_t resident_bytes() const;

  private:
    Mapping(void* base, std::size_t nbytes, int fd, std::shared_ptr<void> borrowed_from = nullptr);

    void* base_;
    std::size_t nbytes_;
    int fd_;
    const int owner_;  // the process that made this
    const std::shared_ptr<void> borrowed_from_;
};

}  // namespace moecomm
