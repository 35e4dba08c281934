#include "memory/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

namespace moecomm {
namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

void* map(std::size_t nbytes, int flags, int fd) {
    void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) fail("mmap of " + std::to_string(nbytes) + " bytes");
    // Fewer page faults and table misses where the system allows it; only advice, so the answer does not matter.
    madvise(base, nbytes, MADV_HUGEPAGE);
    return base;
}

}  // namespace

std::shared_ptr<Mapping> Mapping::create_private(std::size_t nbytes) {
    return std::shared_ptr<Mapping>(new Mapping(map(nbytes, MAP_PRIVATE | MAP_ANONYMOUS, -1), nbytes, -1));
}

std::shared_ptr<Mapping> Mapping::create_shared(const std::string& label, std::size_t nbytes) {
    int fd = memfd_create(label.c_str(), MFD_CLOEXEC);
    if (fd < 0) fail("memfd_create");
    try {
        if (ftruncate(fd, static_cast<off_t>(nbytes)) != 0) fail("ftruncate to " + std::to_string(nbytes) + " bytes");
        return std::shared_ptr<Mapping>(new Mapping(map(nbytes, MAP_SHARED, fd), nbytes, fd));
    } catch (...) {
        close(fd);
        throw;
    }
}

std::shared_ptr<Mapping> Mapping::open_peer(int pid, int fd, std::size_t nbytes) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (own < 0) fail("open of " + path);
    try {
        struct stat facts{};
        if (fstat(own, &facts) != 0) fail("fstat of " + path);
        if (static_cast<std::size_t>(facts.st_size) != nbytes) {
            errno = EINVAL;
            fail(path + " has " + std::to_string(facts.st_size) + " bytes instead of " + std::to_string(nbytes));
        }
        void* base = map(nbytes, MAP_SHARED, own);
        close(own);
        return std::shared_ptr<Mapping>(new Mapping(base, nbytes, -1));
    } catch (...) {
        close(own);
        throw;
    }
}

std::shared_ptr<Mapping> Mapping::borrow(std::uint64_t address, std::size_t nbytes, std::shared_ptr<void> owner) {
    if (!owner) throw std::invalid_argument("Mapping::borrow: the memory has no owner");
    return std::shared_ptr<Mapping>(new Mapping(reinterpret_cast<void*>(address), nbytes, -1, std::move(owner)));
}

Mapping::Mapping(void* base, std::size_t nbytes, int fd, std::shared_ptr<void> borrowed_from)
    : base_(base), nbytes_(nbytes), fd_(fd), owner_(getpid()), borrowed_from_(std::move(borrowed_from)) {}

Mapping::~Mapping() {
    if (borrowed_from_) return;
    munmap(base_, nbytes_);
    close_fd();
}

void Mapping::close_fd() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
}

void Mapping::punch(std::size_t offset, std::size_t nbytes) {
    if (nbytes == 0 || borrowed_from_ || getpid() != owner_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::size_t from = offset;
    for (const auto& [begin, end] : pinned_locked(offset, offset + nbytes)) {
        give_back(from, begin);
        from = end;
    }
    give_back(from, offset + nbytes);
    for (auto pin = pins_.lower_bound(offset); pin != pins_.end(); ++pin)
        if (pin->first + pin->second.nbytes <= offset + nbytes) pin->second.is_unwanted = true;
}

void Mapping::clear(std::size_t offset, std::size_t nbytes) {
    if (borrowed_from_ || getpid() != owner_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::size_t from = offset;
    for (const auto& [begin, end] : pinned_locked(offset, offset + nbytes)) {
        give_back(from, begin);
        std::memset(static_cast<char*>(base_) + begin, 0, end - begin);
        from = end;
    }
    give_back(from, offset + nbytes);
}

void Mapping::give_back(std::size_t begin, std::size_t end) {
    if (begin == end) return;
    // MADV_REMOVE frees the pages of a shared file for every process that maps it; private pages are just dropped.
    char* const start = static_cast<char*>(base_) + begin;
    const std::size_t nbytes = end - begin;
    if (madvise(start, nbytes, MADV_REMOVE) != 0 && madvise(start, nbytes, MADV_DONTNEED) != 0) fail("madvise");
}

void Mapping::pin(std::size_t offset, std::size_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pins_[offset] = {nbytes, false};
}

void Mapping::unpin(std::size_t offset) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pins_.erase(offset);
}

std::vector<std::pair<std::size_t, std::size_t>> Mapping::pinned(std::size_t begin, std::size_t end) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pinned_locked(begin, end);
}

std::vector<std::pair<std::size_t, std::size_t>> Mapping::pinned_locked(std::size_t begin, std::size_t end) const {
    std::vector<std::pair<std::size_t, std::size_t>> found;
    for (const auto& [offset, pin] : pins_) {
        const std::size_t from = std::max(begin, offset), to = std::min(end, offset + pin.nbytes);
        if (from < to) found.emplace_back(from, to);
    }
    return found;
}

std::size_t Mapping::pinned_bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::size_t nbytes = 0;
    for (const auto& entry : pins_) nbytes += entry.second.nbytes;
    return nbytes;
}

bool Mapping::is_unwanted(std::size_t offset) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pins_.find(offset);
    return found != pins_.end() && found->second.is_unwanted;
}

std::size_t Mapping::resident_bytes() const {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    // Looked at in pieces: the vector for a whole sparse mapping could be larger than what is resident.
    const std::size_t step = std::size_t{1} << 30;
    std::vector<unsigned char> present(step / page);
    std::size_t pages = 0;
    for (std::size_t offset = 0; offset < nbytes_; offset += step) {
        const std::size_t length = nbytes_ - offset < step ? nbytes_ - offset : step;
        if (mincore(static_cast<char*>(base_) + offset, length, present.data()) != 0) fail("mincore");
        for (std::size_t i = 0; i < (length + page - 1) / page; ++i) pages += present[i] & 1;
    }
    return pages * page;
}

}  // namespace moecomm
