//! Classes of failure, with the numbers of NCCL's results.

/// The class of a failure, with the number of NCCL's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    /// A CUDA call failed.
    UnhandledCudaError = 1,
    /// The operating system or a caller's allocator failed.
    SystemError = 2,
    /// A defect of this library.
    InternalError = 3,
    /// An argument breaks a rule of its own: NULL, shape, dtype, range.
    InvalidArgument = 4,
    /// The call is not possible in this mode or at this point of the sequence.
    InvalidUsage = 5,
    /// Another rank failed, or did not answer within the deadline.
    RemoteError = 6,
}

impl Code {
    /// The code for a number from another process or library; unknown numbers become internal errors.
    pub fn from_raw(raw: i32) -> Self {
        use Code::*;
        let all = [UnhandledCudaError, SystemError, InvalidArgument, InvalidUsage, RemoteError];
        all.into_iter().find(|code| *code as i32 == raw).unwrap_or(InternalError)
    }
}
