// Blocks of the host that the simulator keeps and calls.
#pragma once
#include <memory>

extern "C" {
void* _Block_copy(const void* block);
void _Block_release(const void* block);
}

namespace metalsim::objc {

// A retained block; calling it passes the block itself as first argument, as the ABI asks.
template <class... Arguments>
class Closure {
  public:
    explicit Closure(const void* block) : block_(_Block_copy(block), &_Block_release) {}
    explicit operator bool() const { return block_ != nullptr; }
    void operator()(Arguments... arguments) const {
        struct Layout {
            void* isa;
            int flags, reserved;
            void (*invoke)(void*, Arguments...);
        };
        static_cast<Layout*>(block_.get())->invoke(block_.get(), arguments...);
    }

  private:
    std::shared_ptr<void> block_;
};

}  // namespace metalsim::objc
