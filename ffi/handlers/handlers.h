// The FFI handlers of this module, by target name.
#ifndef TURBOATTN_HANDLERS_HANDLERS_H_
#define TURBOATTN_HANDLERS_HANDLERS_H_

#include <utility>
#include <vector>

#include "handlers/attributes.h"
#include "handlers/context.h"
#include "handlers/operands.h"
#include "xla/ffi/api/ffi.h"

// A handler is an XLA_FFI_Handler whose C++ body takes (Context, RemainingArgs, RemainingRets, attributes).
#define TURBOATTN_DEFINE_HANDLER(symbol, body, Attributes)                                                    \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                              \
      symbol, body,                                                                                           \
      xla::ffi::Ffi::Bind().Ctx<turboattn::ContextTag>().RemainingArgs().RemainingRets().Attrs<Attributes>(), \
      turboattn::kTraits)

XLA_FFI_DECLARE_HANDLER_SYMBOL(TurboattnAttention);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TurboattnRaggedAttention);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TurboattnPagedAttention);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TurboattnAppendKv);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TurboattnPagedAttentionStep);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TurboattnGatherKv);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TurboattnCopyPages);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TurboattnMakePlan);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TurboattnMergePartials);

namespace turboattn {

// (target name, XLA_FFI_Handler*) of the primitives that this module has kernels for.
std::vector<std::pair<const char*, void*>> Handlers();

}  // namespace turboattn

#endif  // TURBOATTN_HANDLERS_HANDLERS_H_
