# Answers every request for an older C++ standard with the one that torch's headers need. The spelling of
# the flag is the compiler's own (-std=c++20, or -std=c++2a where it is that old).
set(_wanted "$ENV{EDL_HVD_CXX_STANDARD}")
if(NOT CMAKE_CXX_COMPILER_ID)
  return() # one of CMake's own test projects, in C only
endif()
if(NOT CMAKE_CXX${_wanted}_STANDARD_COMPILE_OPTION)
  message(FATAL_ERROR "${CMAKE_CXX_COMPILER} (${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}) does not "
                      "know C++${_wanted}, which the headers of the installed torch need.")
endif()
foreach(_standard 11 14 17)
  set(CMAKE_CXX${_standard}_STANDARD_COMPILE_OPTION "${CMAKE_CXX${_wanted}_STANDARD_COMPILE_OPTION}")
  set(CMAKE_CXX${_standard}_EXTENSION_COMPILE_OPTION "${CMAKE_CXX${_wanted}_EXTENSION_COMPILE_OPTION}")
endforeach()
