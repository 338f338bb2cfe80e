//! `ncclGroupStart` and `ncclGroupEnd`: calls between them take effect together at the end.
//!
//! Each setup call of a group runs in its own thread, since it waits for other ranks, which may be calls of the same
//! group. Sends and receives of a group progress together, since each may wait for another.

use std::cell::RefCell;
use std::sync::Arc;

use super::collective::Collective;
use super::comm::Comm;
use super::error::{Code, Failure, Outcome};
use super::launch;
use super::transfer::Transfer;
use crate::cuda::queue::Stream;

/// One call of a group.
pub(crate) enum Task {
    /// Creates a communicator, which blocks until its ranks have met.
    Setup(Box<dyn FnOnce() -> Outcome<()> + Send>),
    Collective(Arc<Comm>, Arc<Stream>, Collective),
    Transfer(Arc<Comm>, Arc<Stream>, Transfer),
    /// Frees a communicator that was aborted.
    Free(Box<dyn FnOnce() -> Outcome<()> + Send>),
}

#[derive(Default)]
struct Group {
    depth: usize,
    tasks: Vec<Task>,
    failure: Option<Code>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Runs a task now, or keeps it for the end of the group that is open in this thread.
pub(crate) fn run(task: Task) -> Outcome<()> {
    let task = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Some(task);
        }
        group.tasks.push(task);
        None
    });
    task.map_or(Ok(()), |task| perform(vec![task]))
}

/// Marks an open group as failed because of one of its calls.
pub(crate) fn note_failure(code: Code) {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.failure.get_or_insert(code);
        }
    });
}

/// Opens a group; groups nest, and only the outermost counts.
pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Closes a group; closing the outermost performs its calls, or none if one of them was refused.
pub(crate) fn end() -> Outcome<()> {
    let group = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(Failure::new(Code::InvalidUsage, "ncclGroupEnd without ncclGroupStart")),
        1 => Ok(std::mem::take(group)),
        _ => {
            group.depth -= 1;
            Ok(Group::default())
        }
    })?;
    match group.failure {
        Some(code) => Err(Failure::new(code, "a call of this group was refused; none was performed")),
        None => perform(group.tasks),
    }
}

fn perform(tasks: Vec<Task>) -> Outcome<()> {
    let mut setups = Vec::new();
    let mut collectives = Vec::new();
    let mut transfers: Vec<launch::Bundle> = Vec::new();
    let mut frees = Vec::new();
    for task in tasks {
        match task {
            Task::Free(free) => frees.push(free),
            Task::Setup(setup) => setups.push(setup),
            Task::Collective(comm, stream, collective) => {
                collectives.push((comm, stream, collective));
            }
            Task::Transfer(comm, stream, transfer) => {
                match transfers.iter_mut().find(|bundle| Arc::ptr_eq(&bundle.comm, &comm)) {
                    Some(bundle) => bundle.add(stream, transfer),
                    None => transfers.push(launch::Bundle::new(comm, stream, transfer)),
                }
            }
        }
    }
    set_up(setups)?;
    for (comm, stream, collective) in collectives {
        launch::collective(&comm, &stream, collective)?;
    }
    transfers.into_iter().try_for_each(launch::Bundle::launch)?;
    frees.into_iter().try_for_each(|free| free())
}

fn set_up(setups: Vec<Box<dyn FnOnce() -> Outcome<()> + Send>>) -> Outcome<()> {
    if setups.len() <= 1 {
        return setups.into_iter().try_for_each(|setup| setup());
    }
    std::thread::scope(|scope| {
        let running: Vec<_> = setups.into_iter().map(|setup| scope.spawn(setup)).collect();
        running
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|_| Err(Failure::new(Code::InternalError, "panic while setting up")))
            })
            .fold(Ok(()), Result::and)
    })
}
