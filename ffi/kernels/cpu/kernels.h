// The CPU kernels. Each checks nothing about shapes (handlers do) and survives any value in the integer arrays. A
// failed Status means that scratch memory could not be allocated; results are then undefined.
#ifndef TURBOATTN_KERNELS_CPU_KERNELS_H_
#define TURBOATTN_KERNELS_CPU_KERNELS_H_

#include "core/params.h"
#include "core/status.h"
#include "kernels/cpu/parallel.h"

namespace turboattn::cpu {

Status LinearAttention(const LinearAttentionParams& params, Parallel& parallel);
Status PagedAttention(const PagedAttentionParams& params, Parallel& parallel);
Status Append(const AppendParams& params, Parallel& parallel);
Status Gather(const GatherParams& params, Parallel& parallel);
Status CopyPages(const CopyPagesParams& params, Parallel& parallel);
Status Merge(const MergeParams& params, Parallel& parallel);

}  // namespace turboattn::cpu

#endif  // TURBOATTN_KERNELS_CPU_KERNELS_H_
