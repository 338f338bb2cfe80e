//! Elements that tests send, and their comparison with what arrives.

use crate::kit::Buffer;

/// Value of element `index` on a rank; small integers, so that sums are exact.
pub(crate) fn value(rank: usize, index: usize) -> f32 {
    ((rank * 31 + index * 7) % 100) as f32
}

/// Device memory with these elements.
pub(crate) fn floats(count: usize, value: impl Fn(usize) -> f32) -> Buffer {
    let mut bytes = vec![0; 4 * count];
    for (index, element) in bytes.chunks_exact_mut(4).enumerate() {
        element.copy_from_slice(&value(index).to_ne_bytes());
    }
    Buffer::from_bytes(&bytes)
}

/// Compares received elements with the expected ones.
pub(crate) fn check(buffer: &Buffer, expected: impl Fn(usize) -> f32) {
    let got = buffer.floats();
    let wrong = (0..got.len()).find(|index| got[*index] != expected(*index));
    if let Some(index) = wrong {
        panic!("element {index} is {}, not {}", got[index], expected(index));
    }
}
