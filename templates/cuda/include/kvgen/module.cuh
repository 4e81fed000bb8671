// A module of the CUDA back end.
#pragma once
#include "kvgen/host/attend.cuh"
#include "kvgen/host/exports.cuh"

namespace kvgen {

template <class Format, class Schedule, class Shape>
using Module = Exports<Format, Schedule, Shape, Attend<Format, Schedule>>;

}  // namespace kvgen
