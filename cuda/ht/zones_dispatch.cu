// High-throughput dispatch of rows that lie by expert in the output. As dispatch.cu, but what arrives is stored to each
// slot of its row; and the slots of a zone that no row has, and weights behind all zones, get zeros.

#include "../base/entry.cuh"
#include "dispatch_run.cuh"
#include "scaled_rows.cuh"
#include "zoned_rows.cuh"

namespace nccl_ep::ht_dispatch_impl {

ENTRY(ht_dispatch_zones) { run(params.rows, AllRows{}, ZonedRows<PlainRows>{{}, params.zones}); }
ENTRY(ht_dispatch_zones_scaled) {
    run(params.rows.rows, AllRows{}, ZonedRows<ForwardedRows>{{params.rows.scaled}, params.zones});
}
ENTRY(ht_dispatch_zones_nodes) {
    run(params.rows.of_node, RowsOfStage<TwoSided>{params.rows.stage}, ZonedRows<PlainRows>{{}, params.zones});
}
ENTRY(ht_dispatch_zones_nodes_scaled) {
    const HtScaledDispatchParams& of_node = params.rows.of_node;
    run(of_node.rows, RowsOfStage<TwoSided>{params.rows.stage},
        ZonedRows<ForwardedRows>{{of_node.scaled}, params.zones});
}

}  // namespace nccl_ep::ht_dispatch_impl
