#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace lily {

MappedFile::MappedFile(const std::string& path) : path_(path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw CheckpointError("cannot open " + path + ": " + std::strerror(errno));
    struct stat info{};
    if (::fstat(fd, &info) != 0 || info.st_size <= 0) {
        ::close(fd);
        throw CheckpointError(path + " is empty or not a regular file");
    }
    size_ = static_cast<size_t>(info.st_size);
    void* address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
    const int failure = errno;
    ::close(fd);
    if (address == MAP_FAILED) throw CheckpointError("cannot map " + path + ": " + std::strerror(failure));
    data_ = static_cast<const std::byte*>(address);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

void MappedFile::prefer_large_pages() const {
#if defined(MADV_HUGEPAGE)
    // Only advice: a kernel or file system without them says no, and pages are then small.
    ::madvise(const_cast<std::byte*>(data_), size_, MADV_HUGEPAGE);
#endif
}

MappedFile::~MappedFile() {
    if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace lily
