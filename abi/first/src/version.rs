//! The version, as a number and as the banner that tools look for in the file.

macro_rules! version {
    () => {
        concat!(env!("CARGO_PKG_VERSION"), "+cuda", env!("NCCL_EP_CUDA_VERSION"))
    };
}

/// `strings libnccl_ep.so` shows this line; the zeros keep it apart from its neighbours in the file.
#[used]
static BANNER: &str = concat!("\0NCCL EP version ", version!(), "\0");

/// The version as log lines have it.
pub const TEXT: &str = concat!("NCCL EP version ", version!());

/// MAJOR * 10000 + MINOR * 100 + PATCH.
pub fn number() -> i32 {
    env!("CARGO_PKG_VERSION")
        .split(['.', '+', '-'])
        .take(3)
        .map(|part| part.parse::<i32>().unwrap_or(0))
        .fold(0, |number, part| number * 100 + part)
}

#[cfg(test)]
mod tests {
    use crate::types;

    #[test]
    fn the_number_is_cargos() {
        let part = |text: &str| text.parse::<i32>().unwrap();
        let expected = part(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
            + part(env!("CARGO_PKG_VERSION_MINOR")) * 100
            + part(env!("CARGO_PKG_VERSION_PATCH"));
        assert_eq!(super::number(), expected);
        let [major, minor, patch] = [types::NCCL_EP_MAJOR, types::NCCL_EP_MINOR, types::NCCL_EP_PATCH];
        assert_eq!(major * 10_000 + minor * 100 + patch, expected, "types.rs");
    }
}
