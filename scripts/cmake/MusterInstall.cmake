# What `cmake --install` copies: the libraries, the public headers, the programs that were built with their data, and the
# files by which find_package(muster) finds them.
get_property(muster_libraries GLOBAL PROPERTY MUSTER_LIBRARIES)
set(muster_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/muster")

set(muster_installed muster muster_live_sender)
if(TARGET muster_live_fortran)
  list(APPEND muster_installed muster_live_fortran)
  get_target_property(muster_fortran_modules muster_live_fortran Fortran_MODULE_DIRECTORY)
  install(FILES "${muster_fortran_modules}/muster_live.mod" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/muster/fortran")
endif()
foreach(library IN LISTS muster_libraries)
  list(APPEND muster_installed muster_${library})
endforeach()
if(BUILD_SHARED_LIBS)
  list(APPEND muster_installed muster_signals)
else()
  # A static library leaves its own dependencies to whoever links it.
  list(APPEND muster_installed muster_mpi muster_libhdf5 muster_codecs muster_libzip muster_isal)
  if(TARGET muster_tensorboard_libraries)
    list(APPEND muster_installed muster_tensorboard_libraries)
  endif()
endif()
install(TARGETS ${muster_installed} EXPORT musterTargets)
install(EXPORT musterTargets NAMESPACE muster:: DESTINATION "${muster_package_dir}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/muster" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
        FILES_MATCHING PATTERN "*.hpp")
install(FILES "${PROJECT_SOURCE_DIR}/include/muster_live.h" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")

include(MusterJsonMacros)
muster_json_macros(muster_json_macros)
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/musterConfig.cmake.in" "${PROJECT_BINARY_DIR}/musterConfig.cmake"
                              INSTALL_DESTINATION "${muster_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/musterConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/musterConfig.cmake" "${PROJECT_BINARY_DIR}/musterConfigVersion.cmake"
              "${CMAKE_CURRENT_LIST_DIR}/MusterJsonMacros.cmake"
        DESTINATION "${muster_package_dir}")

install(FILES "${PROJECT_SOURCE_DIR}/scripts/packaging/modulefile"
        DESTINATION "${CMAKE_INSTALL_DATADIR}/modulefiles/muster" RENAME "${PROJECT_VERSION}")

# The programs of a folder and of the folders under it; one that was not built is left out.
function(muster_install_programs FOLDER)
  get_property(targets DIRECTORY "${FOLDER}" PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    if(type STREQUAL EXECUTABLE)
      install(TARGETS ${target} RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" OPTIONAL)
    endif()
  endforeach()
  get_property(folders DIRECTORY "${FOLDER}" PROPERTY SUBDIRECTORIES)
  foreach(folder IN LISTS folders)
    muster_install_programs("${folder}")
  endforeach()
endfunction()
if(MUSTER_BUILD_APPS)
  muster_install_programs("${PROJECT_SOURCE_DIR}/apps")
  # An example finds its data there: apps/models/data.cpp.
  file(GLOB folders "${PROJECT_SOURCE_DIR}/apps/*/data")
  foreach(folder IN LISTS folders)
    cmake_path(GET folder PARENT_PATH example)
    cmake_path(GET example FILENAME example)
    install(DIRECTORY "${folder}/" DESTINATION "${CMAKE_INSTALL_DATADIR}/muster/${example}")
  endforeach()
endif()
