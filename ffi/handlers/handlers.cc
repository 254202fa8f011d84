#include "handlers/handlers.h"

namespace turboattn {

std::vector<std::pair<const char*, void*>> Handlers() {
  const auto entry = [](const char* target, XLA_FFI_Handler* handler) {
    return std::make_pair(target, reinterpret_cast<void*>(handler));
  };
  return {
      entry("turboattn_append_kv_v1", TurboattnAppendKv),
      entry("turboattn_gather_kv_v1", TurboattnGatherKv),
      entry("turboattn_copy_pages_v1", TurboattnCopyPages),
      entry("turboattn_make_plan_v1", TurboattnMakePlan),
      entry("turboattn_merge_partials_v1", TurboattnMergePartials),
      entry("turboattn_attention_v1", TurboattnAttention),
      entry("turboattn_ragged_attention_v1", TurboattnRaggedAttention),
      entry("turboattn_paged_attention_v1", TurboattnPagedAttention),
      entry("turboattn_paged_attention_step_v1", TurboattnPagedAttentionStep),
  };
}

}  // namespace turboattn
