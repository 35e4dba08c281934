// Mappings and the arena, from several threads at once.
#include <atomic>
#include <cstring>
#include <random>
#include <system_error>
#include <thread>
#include <vector>

#include "expect.h"
#include "memory/arena.h"
#include "memory/mapping.h"
#include "tests.h"

namespace native_test {
namespace {

constexpr std::size_t kMegabyte = std::size_t{1} << 20;
constexpr std::size_t kBegin = 3 * moecomm::Arena::kGranularity;  // of the blocks; what lies before belongs to others

void blocks_are_disjoint() {
    auto arena = std::make_shared<moecomm::Arena>(moecomm::Mapping::create_private(64 * kMegabyte), 32 * kMegabyte,
                                                  kBegin, 64 * kMegabyte - kBegin);
    const auto worker = [&arena](unsigned seed) {
        std::mt19937 random(seed);
        std::vector<std::unique_ptr<moecomm::Block>> blocks;
        for (int i = 0; i < 400; ++i) {
            const std::size_t nbytes = random() % 100'000;
            if (const auto offset = arena->allocate(nbytes)) {
                blocks.push_back(std::make_unique<moecomm::Block>(arena, *offset, nbytes));
                std::memset(reinterpret_cast<void*>(blocks.back()->address()), static_cast<int>(seed), nbytes);
            }
            if (blocks.size() > 20) {
                const std::size_t victim = random() % blocks.size();
                const char* bytes = reinterpret_cast<const char*>(blocks[victim]->address());
                for (std::size_t at = 0; at < blocks[victim]->nbytes(); at += 997)
                    EXPECT(bytes[at] == static_cast<char>(seed));
                blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(victim));
            }
            if (i % 100 == 0) arena->usage();
        }
    };
    std::vector<std::thread> threads;
    for (unsigned seed = 1; seed <= 4; ++seed) threads.emplace_back(worker, seed);
    for (std::thread& thread : threads) thread.join();
    EXPECT(arena->usage().live_bytes == 0 && arena->usage().live_blocks == 0);
    EXPECT(!arena->allocate(33 * kMegabyte));
    EXPECT(arena->allocate(32 * kMegabyte) == kBegin);
}

void trimming_spares_live_blocks(const std::shared_ptr<moecomm::Mapping>& mapping) {
    auto arena = std::make_shared<moecomm::Arena>(mapping, mapping->nbytes(), 0, mapping->nbytes());
    const std::size_t first = *arena->allocate(kMegabyte);
    const std::size_t second = *arena->allocate(kMegabyte);
    char* base = reinterpret_cast<char*>(mapping->address());
    std::memset(base + first, 1, kMegabyte);
    std::memset(base + second, 2, kMegabyte);
    arena->release(first);
    arena->trim();
    EXPECT(base[first] == 0 && base[first + kMegabyte - 1] == 0);
    EXPECT(base[second] == 2 && base[second + kMegabyte - 1] == 2);
    arena->release(second);
}

// What is written to pinned pages stays, however often others give back all pages meanwhile.
void pinned_pages_stay(const std::shared_ptr<moecomm::Mapping>& mapping) {
    std::atomic<bool> is_done{false};
    std::thread giver([&] {
        while (!is_done) mapping->punch(0, mapping->nbytes());
    });
    const std::size_t part = mapping->nbytes() / 4;
    const auto user = [&](std::size_t offset) {
        char* const bytes = reinterpret_cast<char*>(mapping->address() + offset);
        for (char value = 1; value < 50; ++value) {
            mapping->pin(offset, part);
            std::memset(bytes, value, part);
            std::this_thread::yield();
            for (std::size_t at = 0; at < part; at += 997) EXPECT(bytes[at] == value);
            mapping->unpin(offset);
        }
    };
    std::thread second(user, 2 * part);
    user(0);
    second.join();
    is_done = true;
    giver.join();
    EXPECT(mapping->pinned_bytes() == 0);
}

void what_cannot_be_mapped_throws() {
    bool thrown = false;
    try {
        moecomm::Mapping::open_peer(1, 1'000'000, 4096);
    } catch (const std::system_error&) {
        thrown = true;
    }
    EXPECT(thrown);
}

}  // namespace

void test_memory() {
    blocks_are_disjoint();
    trimming_spares_live_blocks(moecomm::Mapping::create_private(8 * kMegabyte));
    trimming_spares_live_blocks(moecomm::Mapping::create_shared("trim", 8 * kMegabyte));
    pinned_pages_stay(moecomm::Mapping::create_private(kMegabyte));
    pinned_pages_stay(moecomm::Mapping::create_shared("pins", kMegabyte));
    what_cannot_be_mapped_throws();
}

}  // namespace native_test
