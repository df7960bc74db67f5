// A file mapped read-only; the pages are shared with the page cache and evictable.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace lily {

class MappedFile {
  public:
    explicit MappedFile(const std::string& path);  // CheckpointError when it can't be opened or mapped
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept;
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;
    MappedFile& operator=(MappedFile&&) = delete;

    std::span<const std::byte> bytes() const { return {data_, size_}; }
    const std::string& path() const { return path_; }

    // Asks for large pages, read from disk and mapped as a whole, where the system has them. For files that
    // stay in memory: one that doesn't fit would be read in larger pieces than are used.
    void prefer_large_pages() const;

  private:
    std::string path_;
    const std::byte* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace lily
