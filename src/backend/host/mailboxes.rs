//! The protocol of every operation: post a message, read all ranks' messages, release them.
//!
//! A group's operations are numbered in call order, the same on every rank. Each operation has two epochs: one for its
//! message, and the one before for data that the message depends on. A rank posts a message in any of its banks that
//! all readers have released. Readers search the banks for the epoch, so a bank held by a staged operation does not
//! block later ones.
//!
//! Why no wait is endless: at most two operations are staged, each holds one bank, and the other banks are released by
//! receive phases that only wait for posts of the same epoch. Every wait has a deadline all the same.

use crate::backend::host::message::Message;
use crate::backend::host::window::{BANKS, Bank, Contents, Window};
use crate::error::{Code, Error, Result};
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::ops::Deref;
use std::time::{Duration, Instant};

/// Longest sleep between checks of the ranks' failure marks.
const LOOK: Duration = Duration::from_millis(50);

const EPOCHS_PER_OPERATION: u64 = 2;

/// All ranks' windows, and this rank's place in the sequence of operations.
pub struct Mailboxes {
    rank: usize,
    windows: Vec<Window>,
    timeout: Duration,
    last_epoch: Mutex<u64>,
    abandoned: Mutex<Vec<u64>>,
    posting: Mutex<()>,
    fault: OnceCell<Error>,
}

impl Mailboxes {
    /// The mailboxes of `rank`; `windows` are those of all ranks, in rank order.
    pub fn new(rank: usize, windows: Vec<Window>, timeout: Duration) -> Self {
        Self {
            rank,
            windows,
            timeout,
            last_epoch: Mutex::default(),
            abandoned: Mutex::default(),
            posting: Mutex::default(),
            fault: OnceCell::new(),
        }
    }

    /// How long a wait for another rank may last.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    pub fn ranks(&self) -> usize {
        self.windows.len()
    }

    /// Numbers a new operation in call order; `launch` gets its epoch. If `launch` fails, the number is not used up, as
    /// the other ranks will not see the operation.
    pub fn begin(&self, launch: impl FnOnce(u64) -> Result<()>) -> Result<u64> {
        let mut last = self.last_epoch.lock();
        let epoch = *last + EPOCHS_PER_OPERATION;
        launch(epoch)?;
        *last = epoch;
        Ok(epoch)
    }

    /// The epoch of the operation before the one of `epoch`.
    pub fn previous(epoch: u64) -> u64 {
        epoch - EPOCHS_PER_OPERATION
    }

    /// The epoch of the exchange that precedes the message of `epoch`.
    pub fn before(epoch: u64) -> u64 {
        epoch - 1
    }

    /// The first failure on this rank.
    pub fn fault(&self) -> Option<Error> {
        self.fault.get().cloned()
    }

    /// Records a failure and tells the peers, so that they do not wait for this rank.
    pub fn fail(&self, error: Error) {
        // The first failure is the one worth reporting.
        let _ = self.fault.set(error);
        if let Ok(own) = self.window(self.rank) {
            own.set_failed();
        }
    }

    /// Gives up reading the messages of `epoch`; a later post releases them.
    pub fn abandon(&self, epoch: u64) {
        self.abandoned.lock().push(epoch);
    }

    /// Posts this rank's message of `epoch`.
    pub fn post(&self, epoch: u64, message: &Message<'_>) -> Result<()> {
        let _one_at_a_time = self.posting.lock();
        self.settle_abandoned(epoch)?;
        let own = self.window(self.rank)?;
        let is_free = |bank: &Bank<'_>| (0..self.ranks()).all(|reader| bank.is_read_by(reader));
        let bank = self.wait(
            own,
            || (0..BANKS).map(|bank| own.bank(bank)).find(is_free),
            || {
                let slow: Vec<usize> = (0..self.ranks())
                    .filter(|&reader| !(0..BANKS).all(|bank| own.bank(bank).is_read_by(reader)))
                    .collect();
                let operation = operation_of(epoch);
                format!("a free bank for operation {operation}, held by ranks {slow:?}")
            },
        )?;
        bank.write(message.len(), |to| message.write_to(to))?;
        bank.post(epoch, message.len());
        Ok(())
    }

    /// The messages of all ranks for `epoch`, in rank order.
    pub fn receive_all(&self, epoch: u64) -> Result<Vec<Received<'_>>> {
        (0..self.ranks()).map(|source| self.receive(epoch, source)).collect()
    }

    /// The ranks that have not posted their messages of `epoch`, before anybody has released them.
    pub fn missing(&self, epoch: u64) -> Vec<usize> {
        let posted = |window: &Window| (0..BANKS).any(|bank| window.bank(bank).posted() == epoch);
        let silent = self.windows.iter().enumerate().filter(|(_, window)| !posted(window));
        silent.map(|(rank, _)| rank).collect()
    }

    /// Waits for the message of `source` for `epoch`; dropping the result releases it.
    pub fn receive(&self, epoch: u64, source: usize) -> Result<Received<'_>> {
        let window = self.window(source)?;
        let banks = || (0..BANKS).map(|bank| window.bank(bank));
        let start = Instant::now();
        let bank = self.wait(
            window,
            || {
                // A rank that makes another call may skip the preceding message; its next post says which call it made.
                // The preceding one is searched first, as ranks post in this order.
                let instead = banks().find(|bank| is_before(epoch) && bank.posted() == epoch + 1);
                banks().find(|bank| bank.posted() == epoch).or(instead)
            },
            || {
                let newest = banks().map(|bank| bank.posted()).max().unwrap_or(0);
                let (operation, last) = (operation_of(epoch), newest / EPOCHS_PER_OPERATION);
                format!("operation {operation} of rank {source}, whose last one is {last}")
            },
        )?;
        Ok(Received { message: bank.read()?, bank, reader: self.rank, epoch, waited: start.elapsed() })
    }

    /// Releases abandoned messages of operations before `epoch` for which this rank has posted its own message. Their
    /// senders have posted theirs, or will without waiting for this rank. The others are left to a later post: a handle
    /// may be destroyed before its send phase has run, perhaps on another stream.
    fn settle_abandoned(&self, epoch: u64) -> Result<()> {
        let own = self.window(self.rank)?;
        let is_posted = |other| (0..BANKS).any(|bank| own.bank(bank).posted() == other);
        let mut abandoned = self.abandoned.lock();
        let (settled, open) = abandoned.drain(..).partition::<Vec<_>, _>(|&other| other < epoch && is_posted(other));
        *abandoned = open;
        drop(abandoned);
        for unread in settled {
            for source in 0..self.ranks() {
                drop(self.receive(unread, source)?);
            }
        }
        Ok(())
    }

    /// Waits until `ready` returns a value. The bell of `window` announces changes; `wanted` names what is awaited, for
    /// errors.
    fn wait<T>(&self, window: &Window, ready: impl Fn() -> Option<T>, wanted: impl Fn() -> String) -> Result<T> {
        let start = Instant::now();
        loop {
            let rings = window.bell();
            if let Some(found) = ready() {
                return Ok(found);
            }
            if let Some(failed) = self.windows.iter().position(Window::has_failed) {
                return Err(self.gave_up(format!("rank {failed} failed"), start, &wanted()));
            }
            let Some(left) = self.timeout.checked_sub(start.elapsed()) else {
                return Err(self.gave_up("deadline passed".to_owned(), start, &wanted()));
            };
            window.wait_for_bell(rings, left.min(LOOK));
        }
    }

    fn gave_up(&self, why: String, start: Instant, wanted: &str) -> Error {
        let waited = start.elapsed().as_millis();
        Error::new(Code::RemoteError, format!("{why}: rank {} waited {waited} ms for {wanted}", self.rank))
    }

    fn window(&self, rank: usize) -> Result<&Window> {
        self.windows.get(rank).ok_or_else(|| Error::internal("a rank without a window"))
    }
}

/// Whether `epoch` belongs to an exchange before an operation's message.
fn is_before(epoch: u64) -> bool {
    !epoch.is_multiple_of(EPOCHS_PER_OPERATION)
}

/// The number of the operation that `epoch` belongs to.
fn operation_of(epoch: u64) -> u64 {
    epoch.div_ceil(EPOCHS_PER_OPERATION)
}

/// A message being read; dropping it releases the bank.
pub struct Received<'a> {
    message: Contents,
    bank: Bank<'a>,
    reader: usize,
    epoch: u64,
    waited: Duration,
}

impl Received<'_> {
    /// How long it took to arrive, after those waited for before it.
    pub fn waited_ns(&self) -> i64 {
        self.waited.as_nanos().try_into().unwrap_or(i64::MAX)
    }
}

impl Deref for Received<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.message
    }
}

impl Drop for Received<'_> {
    fn drop(&mut self) {
        self.bank.set_read(self.reader, self.epoch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(mailboxes: &Mailboxes) -> u64 {
        mailboxes.begin(|_| Ok(())).unwrap()
    }

    /// The mailboxes of `ranks` ranks in this process.
    fn ranks(ranks: usize, timeout: Duration) -> Vec<Mailboxes> {
        let made: Vec<Window> = (0..ranks).map(|_| Window::create(ranks).unwrap()).collect();
        let open = |rank| {
            let windows = made.iter().map(|w| Window::open(w.address(), ranks).unwrap()).collect();
            Mailboxes::new(rank, windows, timeout)
        };
        (0..ranks).map(open).collect()
    }

    fn post(mailboxes: &Mailboxes, epoch: u64, text: &[u8]) -> Result<()> {
        let mut message = Message::default();
        message.bytes(text);
        mailboxes.post(epoch, &message)
    }

    #[test]
    fn everybody_reads_everybody() {
        let all = ranks(3, Duration::from_secs(20));
        std::thread::scope(|scope| {
            for mailboxes in &all {
                scope.spawn(move || {
                    for _ in 0..200 {
                        let epoch = begin(mailboxes);
                        post(mailboxes, epoch, format!("{} {epoch}", mailboxes.rank).as_bytes()).unwrap();
                        for source in 0..mailboxes.ranks() {
                            let received = mailboxes.receive(epoch, source).unwrap();
                            assert_eq!(&received[..], format!("{source} {epoch}").as_bytes());
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn operations_that_stay_unread_do_not_stop_later_ones() {
        let mailboxes = &ranks(1, Duration::from_secs(20))[0];
        let staged = [begin(mailboxes), begin(mailboxes)];
        for epoch in staged {
            post(mailboxes, epoch, b"staged").unwrap();
        }
        for _ in 0..20 {
            let epoch = begin(mailboxes);
            post(mailboxes, epoch, b"whole").unwrap();
            drop(mailboxes.receive(epoch, 0).unwrap());
        }
        for epoch in staged {
            assert_eq!(&mailboxes.receive(epoch, 0).unwrap()[..], b"staged");
        }
    }

    #[test]
    fn abandoned_operations_free_their_banks() {
        let all = ranks(1, Duration::from_secs(20));
        for _ in 0..20 {
            let epoch = begin(&all[0]);
            post(&all[0], epoch, b"never read").unwrap();
            all[0].abandon(epoch);
        }
    }

    #[test]
    fn an_operation_may_be_abandoned_before_it_is_posted() {
        let all = ranks(1, Duration::from_secs(20));
        for _ in 0..20 {
            let epoch = begin(&all[0]);
            all[0].abandon(epoch);
            post(&all[0], epoch, b"never read").unwrap();
        }
    }

    #[test]
    fn an_operation_may_be_posted_after_later_ones_and_never_read() {
        let all = ranks(1, Duration::from_secs(20));
        for _ in 0..20 {
            let (late, next) = (begin(&all[0]), begin(&all[0]));
            all[0].abandon(late);
            post(&all[0], next, b"next").unwrap();
            drop(all[0].receive(next, 0).unwrap());
            post(&all[0], late, b"never read").unwrap();
        }
    }

    #[test]
    fn a_silent_rank_is_named_after_the_deadline() {
        let all = ranks(2, Duration::from_millis(80));
        let epoch = begin(&all[0]);
        post(&all[0], epoch, b"here").unwrap();
        let error = all[0].receive(epoch, 1).err().unwrap();
        assert_eq!(error.code(), Code::RemoteError);
        assert!(error.text().contains("rank 0 waited"), "{error}");
        assert!(error.text().contains("operation 1 of rank 1, whose last one is 0"), "{error}");
        assert_eq!(all[0].missing(epoch), [1]);
        post(&all[1], Mailboxes::before(epoch), b"half of it").unwrap();
        assert_eq!(all[0].missing(epoch), [1]);
        let error = all[0].receive(epoch, 1).err().unwrap();
        assert!(error.text().ends_with("whose last one is 0"), "{error}");
    }

    #[test]
    fn a_message_tells_that_the_one_before_it_was_skipped() {
        let all = ranks(2, Duration::from_secs(60));
        let epoch = begin(&all[0]);
        post(&all[1], epoch, b"another call").unwrap();
        let instead = all[0].receive(Mailboxes::before(epoch), 1).unwrap();
        assert_eq!(&instead[..], b"another call");
        drop(instead);
        assert_eq!(&all[0].receive(epoch, 1).unwrap()[..], b"another call");
    }

    #[test]
    fn a_failed_rank_ends_the_wait_at_once() {
        let all = ranks(2, Duration::from_secs(60));
        all[1].fail(Error::internal("planted"));
        let start = Instant::now();
        let error = all[0].receive(1, 1).err().unwrap();
        assert!(error.text().starts_with("rank 1 failed"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
