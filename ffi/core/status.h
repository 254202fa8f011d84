// Outcome of host code below handlers/: returned, never thrown, and nothing exits. handlers/ turns a failure into an
// ffi::Error.
#ifndef TURBOATTN_CORE_STATUS_H_
#define TURBOATTN_CORE_STATUS_H_

#include <string>
#include <utility>

namespace turboattn {

class Status {
 public:
  Status() = default;  // success
  static Status Error(std::string message) { return Status(std::move(message)); }

  bool ok() const { return message_.empty(); }
  // What went wrong, without the kernel's name, which the handler adds; empty on success.
  const std::string& message() const { return message_; }

 private:
  explicit Status(std::string message)
      : message_(message.empty() ? std::string("unknown error") : std::move(message)) {}
  std::string message_;
};

}  // namespace turboattn

#endif  // TURBOATTN_CORE_STATUS_H_
