// The kernels of a model: a library for each format among its weights, and one for what reads no weights.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/metal/kernel_library.h"
#include "backend/metal/matrix_path.h"
#include "backend/metal/switches.h"
#include "backend/metal/weights.h"

namespace lily::metal {

class KernelSet {
  public:
    // `path` is to be tried beside simdgroup matrices. What is switched off is replaced by other kernels of
    // the same names.
    KernelSet(Device& device, const Switches& switches, MatrixPath path);

    Kernels& common() { return *common_; }
    // Begins to compile at the first call for a format.
    Kernels& of(const NumberFormat& format);
    // The pieces of fused products, each a launch, for what can't be fused or is switched off: the same.
    Kernels& unfused(const NumberFormat& format);
    // Waits for all but tensor operations, which are tried. BackendError if one doesn't compile.
    void require_all();

  private:
    Kernels::Macros with_format(const NumberFormat& format) const;

    Device& device_;
    Kernels::Macros macros_;
    MatrixPath path_;
    bool one_row_;
    std::vector<KernelSource> with_weights_, without_weights_, unfused_;
    std::unique_ptr<Kernels> common_;
    std::map<NumberFormat, std::unique_ptr<Kernels>> by_format_, unfused_by_format_;
};

// A kernel, found when it is first needed: libraries compile while weights are read.
class OneKernel {
  public:
    OneKernel(Kernels& kernels, std::string family, std::string name)
        : kernels_(&kernels), family_(std::move(family)), name_(std::move(name)) {}
    const Kernel& operator()() const {
        if (!kernel_) kernel_ = &kernels_->get(family_, name_);
        return *kernel_;
    }

  private:
    Kernels* kernels_;
    std::string family_, name_;
    mutable const Kernel* kernel_ = nullptr;
};

// Kernels of one name by the rows they have room for, "<name>_m<room>".
class RowKernels {
  public:
    RowKernels(Kernels& kernels, const std::string& family, const std::string& name) {
        for (const int room : {1, 2, 4, 8}) {
            by_room_.emplace_back(kernels, family, name + "_m" + std::to_string(room));
        }
    }
    const Kernel& operator()(int64_t rows) const {
        return by_room_[rows <= 1 ? 0 : rows <= 2 ? 1 : rows <= 4 ? 2 : 3]();
    }

  private:
    std::vector<OneKernel> by_room_;
};

}  // namespace lily::metal
