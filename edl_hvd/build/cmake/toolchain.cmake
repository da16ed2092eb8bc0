# The entry: Horovod's CMake reads this file first, because CMAKE_TOOLCHAIN_FILE names it.
#
# EDL_HVD_CXX_STANDARD  17 or 20: what the headers of the installed torch ask for
# EDL_HVD_CPU_ONLY      1 keeps CUDA out, however much of it is in sight

# Horovod fixes C++14 in its own lists; both hooks below run after a language is set up and before its
# first target.
set(CMAKE_PROJECT_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/standard.cmake")
set(CMAKE_USER_MAKE_RULES_OVERRIDE_CUDA "${CMAKE_CURRENT_LIST_DIR}/cuda_standard.cmake")

# The bundled Gloo uses uint8_t and its kin without including <cstdint>, and Horovod's group_table.h std::string without
# <string>; GCC 13 stopped bringing them along.
set(CMAKE_CXX_FLAGS_INIT "-include cstdint -include stdexcept -include string")

# CMake 4 refuses the bundled Gloo, which asks for the behaviour of CMake 2.8.
set(CMAKE_POLICY_VERSION_MINIMUM 3.13)

if("$ENV{EDL_HVD_CPU_ONLY}" STREQUAL "1")
  # Horovod looks for a CUDA compiler even when nobody asked for a GPU, and a compiler it finds but
  # cannot use (nvcc lags behind GCC) ends the build.
  set(CMAKE_CUDA_COMPILER NOTFOUND)
  set(CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit TRUE)
  set(CMAKE_DISABLE_FIND_PACKAGE_NVTX TRUE)
  list(INSERT CMAKE_MODULE_PATH 0 "${CMAKE_CURRENT_LIST_DIR}/cpu_only")
endif()
