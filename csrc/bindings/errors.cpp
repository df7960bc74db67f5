#include <nanobind/nanobind.h>

#include "base/error.h"
#include "bindings/bindings.h"

namespace nb = nanobind;

namespace lily {
namespace {

void raise(const char* type, const char* message) {
    const nb::object error = nb::module_::import_("lily_py.errors").attr(type);
    PyErr_SetString(error.ptr(), message);
}

}  // namespace

void register_errors() {
    nb::register_exception_translator(
        [](const std::exception_ptr& exception, void*) {
            try {
                std::rethrow_exception(exception);
            } catch (const CheckpointError& e) {
                raise("CheckpointError", e.what());
            } catch (const InvalidArgument& e) {
                raise("InvalidArgumentError", e.what());
            } catch (const MemoryBudgetError& e) {
                raise("MemoryBudgetError", e.what());
            } catch (const BackendError& e) {
                raise("BackendError", e.what());
            }
        },
        nullptr);
}

}  // namespace lily
