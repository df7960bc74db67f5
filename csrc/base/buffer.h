// Owned, 64-byte aligned storage for plain data.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <type_traits>

namespace lily {

template <typename T>
class Buffer {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    Buffer() = default;
    explicit Buffer(size_t count) : size_(count) {
        if (count == 0) return;
        const size_t bytes = (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
        data_.reset(static_cast<T*>(std::aligned_alloc(kAlignment, bytes)));
        if (!data_) throw std::bad_alloc();
        std::memset(static_cast<void*>(data_.get()), 0, bytes);
    }

    T* data() { return data_.get(); }
    const T* data() const { return data_.get(); }
    size_t size() const { return size_; }
    size_t bytes() const { return size_ * sizeof(T); }
    T& operator[](size_t i) { return data_.get()[i]; }
    const T& operator[](size_t i) const { return data_.get()[i]; }
    std::span<T> span() { return {data(), size_}; }

    // Keeps the storage when it is large enough; the contents are then whatever they were.
    void ensure(size_t count) {
        if (count > size_) *this = Buffer(count);
    }

  private:
    static constexpr size_t kAlignment = 64;
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::unique_ptr<T, Free> data_;
    size_t size_ = 0;
};

}  // namespace lily
