// A range of address space: private to the process, or shared through an anonymous file that has no name anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

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
    // Gives the pages of [offset, offset + nbytes) back to the system, where they are not pinned; those that are given
    // back read as zero afterwards. Does nothing in a forked child, to whom they do not belong, or with borrowed
    // memory.
    void punch(std::size_t offset, std::size_t nbytes);
    // Makes [offset, offset + nbytes), whole pages, read as zero: gives the pages back or, where pinned, clears them.
    void clear(std::size_t offset, std::size_t nbytes);

    // A network card writes to the pages that it was told of, also after the system has put others in their place. So
    // what is registered with one is pinned first, and pinned pages are not given back. Pinned parts do not overlap.
    void pin(std::size_t offset, std::size_t nbytes);
    void unpin(std::size_t offset);
    // The pinned parts of [begin, end), from one to.
    std::vector<std::pair<std::size_t, std::size_t>> pinned(std::size_t begin, std::size_t end) const;
    std::size_t pinned_bytes() const;
    // Whether punch was asked to give back all of the part pinned at `offset`.
    bool is_unwanted(std::size_t offset) const;
    // Pages of the mapping that are in memory, in bytes.
    std::size_t resident_bytes() const;

  private:
    struct Pin {
        std::size_t nbytes;
        bool is_unwanted;
    };

    Mapping(void* base, std::size_t nbytes, int fd, std::shared_ptr<void> borrowed_from = nullptr);
    std::vector<std::pair<std::size_t, std::size_t>> pinned_locked(std::size_t begin, std::size_t end) const;
    void give_back(std::size_t begin, std::size_t end);

    void* base_;
    std::size_t nbytes_;
    int fd_;
    const int owner_;  // the process that made this
    const std::shared_ptr<void> borrowed_from_;
    mutable std::mutex mutex_;         // nothing is pinned while pages are given back
    std::map<std::size_t, Pin> pins_;  // by offset
};

}  // namespace moecomm
