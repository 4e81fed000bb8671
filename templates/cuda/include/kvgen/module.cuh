// A module of the CUDA back end.
#pragma once
#include "kvgen/attend.cuh"
#include "kvgen/exports.cuh"

namespace kvgen {

template <class Format, class Schedule>
struct ModuleAttend : Attend<Format, Schedule> {
  static constexpr int kMostBatch = kMaxBatch;
};

template <class Format, class Schedule, class Shape>
using Module = Exports<Format, Schedule, Shape, ModuleAttend<Format, Schedule>>;

}  // namespace kvgen
