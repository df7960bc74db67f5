// Exceptions that cross the library; the bindings turn each into its Python twin in lily_py.errors.
#pragma once

#include <stdexcept>
#include <string>

namespace lily {

class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// A file, tensor or configuration that cannot be used.
class CheckpointError : public Error {
  public:
    using Error::Error;
};

// An argument out of its range, named in the message.
class InvalidArgument : public Error {
  public:
    using Error::Error;
};

// More memory than the budget allows.
class MemoryBudgetError : public Error {
  public:
    using Error::Error;
};

// The backend could not do its work.
class BackendError : public Error {
  public:
    using Error::Error;
};

}  // namespace lily
