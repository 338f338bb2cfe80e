// How rows lie; see layout.h.
#include "reference/layout.h"

RefLayout ref_expert_major(unsigned local_experts, unsigned slots) {
    EP_REQUIRE(local_experts > 0);
    return (RefLayout){local_experts, slots};
}

RefLayout ref_rank_major(unsigned ranks, unsigned max_tokens) { return (RefLayout){ranks, max_tokens}; }

RefLayout ref_flat(unsigned rows) { return (RefLayout){0, rows}; }

size_t ref_layout_rows(RefLayout layout) {
    return layout.parts == 0 ? layout.rows : (size_t)layout.parts * layout.rows;
}

size_t ref_layout_row(RefLayout layout, unsigned part, size_t index) { return (size_t)part * layout.rows + index; }

unsigned ref_layout_sizes(RefLayout layout, unsigned columns, unsigned sizes[3]) {
    unsigned count = 0;
    if (layout.parts != 0) sizes[count++] = layout.parts;
    sizes[count++] = layout.rows;
    sizes[count++] = columns;
    return count;
}
