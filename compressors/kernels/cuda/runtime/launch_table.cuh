// The table of tensors that one launch works on, passed by value: nothing is copied beforehand.
// Its layout is that of launch_table.py.

#define MOST_SEGMENTS 32
#define MOST_PARTS 96

struct Part {  // the arrays of one payload
    void* codes;
    void* scales;
    float* lows;
};

struct Segment {  // one tensor
    void* data;  // the values that are encoded, or the output
    float* residual;
    i64 n;
    i64 first;  // number of its first unit of work among those of all segments
    u64 key;    // of random numbers
    u64 start;  // their counter of element 0
};

struct Table {
    Segment segments[MOST_SEGMENTS];
    Part parts[MOST_PARTS];
    i64 units;
    const float* forward;  // matrices of a transform, where there is one
    const float* inverse;
    int* flag;   // set to 1 where something is not finite; may be null
    i64 stride;  // bytes from one of a segment's payloads to the next; 0: each has a part
    int count;
    int shards;  // payloads that are summed for each segment
    float decay;
    float scale;
    float weight;  // what decoded values, or their sums, are multiplied by
    int unused;
};

// Payload p of those that are summed for a segment; their parts begin at `first`.
INLINE Part source_of(const Table& table, int first, int number, int p) {
    if (table.stride == 0) return table.parts[first + number * table.shards + p];
    const Part& part = table.parts[first + number];
    const u64 by = (u64)(p * table.stride);
    return {(void*)((u64)part.codes + by), (void*)((u64)part.scales + by),
            (float*)((u64)part.lows + by)};
}

// The segment that a unit of work belongs to.
INLINE int segment_of(const Table& table, i64 unit) {
    return last_begun(table.count, [&](int i) { return table.segments[i].first <= unit; });
}

INLINE bool aligned(const void* pointer, unsigned bytes) {
    return ((u64)pointer & (bytes - 1)) == 0;
}
