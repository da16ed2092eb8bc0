# Takes the place of Horovod's module of the same name in a CPU-only build.
#
# Horovod's module turns CUDA on when torch is a CUDA build and torch.utils.cpp_extension.CUDA_HOME is not
# None. No environment variable makes it None on a machine that has /usr/local/cuda. This one describes
# torch as a plain C++ library, which is all a build without GPU operations needs.
#
# Reads PY_EXE; sets the Pytorch_* variables that horovod/torch/CMakeLists.txt reads.

set(_facts [[
import torch
from torch.utils.cpp_extension import include_paths, library_paths
print(torch.__version__)
print(str(torch.compiled_with_cxx11_abi()).upper())
print(";".join(include_paths()))
print(";".join(library_paths()))
]])
execute_process(COMMAND ${PY_EXE} -c "${_facts}"
                OUTPUT_VARIABLE _answer RESULT_VARIABLE _status OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT _status EQUAL 0)
  message(FATAL_ERROR "${PY_EXE} cannot import torch")
endif()
string(REGEX MATCH "^([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)$" _answer "${_answer}")
set(Pytorch_VERSION "${CMAKE_MATCH_1}")
set(Pytorch_CXX11 "${CMAKE_MATCH_2}")
set(Pytorch_INCLUDE_DIRS "${CMAKE_MATCH_3}")
set(Pytorch_LIBRARY_DIRS "${CMAKE_MATCH_4}")

set(Pytorch_CUDA FALSE)
set(Pytorch_ROCM FALSE)
if(Pytorch_CXX11)
  set(Pytorch_COMPILE_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=1")
else()
  set(Pytorch_COMPILE_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")
endif()

set(Pytorch_LIBRARIES "")
foreach(_library c10 torch torch_cpu torch_python)
  find_library(Pytorch_${_library}_LIBRARY NAMES ${_library} HINTS ${Pytorch_LIBRARY_DIRS} NO_DEFAULT_PATH)
  list(APPEND Pytorch_LIBRARIES "${Pytorch_${_library}_LIBRARY}")
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Pytorch REQUIRED_VARS Pytorch_c10_LIBRARY Pytorch_torch_LIBRARY Pytorch_INCLUDE_DIRS VERSION_VAR Pytorch_VERSION)
