// Python module _cpu: the FFI handlers over the CPU kernels.
#include <nanobind/nanobind.h>

#include "module_common.h"

NB_MODULE(_cpu, module) { turboattn::DefineCommon(module); }
