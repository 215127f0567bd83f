//! Owns: the two relics at ports of a PC: the keyboard controller that resets the machine, and the serial port.
//! Threads: the vCPUs'.

use super::bus::BusDevice;
use super::{Console, Error};
use std::io;
use std::sync::{Mutex, PoisonError};
use vm_superio::serial::NoEvents;
use vm_superio::{I8042Device, Serial, Trigger};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// The ports of the keyboard controller: 0x60 and 0x64.
pub(super) const I8042: u64 = 0x60;
pub(super) const I8042_PORTS: u64 = 5;
/// The first serial port, and its interrupt.
pub(super) const COM1: u64 = 0x3f8;
pub(super) const COM1_PORTS: u64 = 8;
pub(super) const COM1_GSI: u32 = 4;

/// Something that happens when a device says so.
pub(super) struct Call<F>(F);

impl<F: Fn()> Trigger for Call<F> {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        (self.0)();
        Ok(())
    }
}

/// The keyboard controller: no keyboard, but writing 0xfe to its command port calls `reset`.
pub(super) struct Keyboard<F: Fn()>(Mutex<I8042Device<Call<F>>>);

impl<F: Fn()> Keyboard<F> {
    pub fn new(reset: F) -> Keyboard<F> {
        Keyboard(Mutex::new(I8042Device::new(Call(reset))))
    }
}

impl<F: Fn() + Send> BusDevice for Keyboard<F> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let ([byte], Ok(offset)) = (data, u8::try_from(offset)) {
            *byte = self.0.lock().unwrap_or_else(PoisonError::into_inner).read(offset);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let ([byte], Ok(offset)) = (data, u8::try_from(offset)) {
            let done = self.0.lock().unwrap_or_else(PoisonError::into_inner).write(offset, *byte);
            if let Err(error) = done {
                tracing::error!("the keyboard controller cannot reset the machine: {error:?}");
            }
        }
    }
}

/// What the guest writes, on its way to the console.
pub(super) struct Sink(Console);

impl io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.0)(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An eventfd that raises an interrupt.
pub(super) struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// The serial port. Nothing can be typed into it.
pub(super) struct SerialPort(Mutex<Serial<Line, NoEvents, Sink>>);

impl SerialPort {
    /// The port, and the eventfd of its interrupt.
    pub fn new(console: Console) -> Result<(SerialPort, EventFd), Error> {
        let make = |source| Error::Make { what: "an interrupt for the serial port", source };
        let line = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(make)?;
        let ours = line.try_clone().map_err(make)?;
        Ok((SerialPort(Mutex::new(Serial::new(Line(ours), Sink(console)))), line))
    }
}

impl BusDevice for SerialPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let ([byte], Ok(offset)) = (data, u8::try_from(offset)) {
            *byte = self.0.lock().unwrap_or_else(PoisonError::into_inner).read(offset);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let ([byte], Ok(offset)) = (data, u8::try_from(offset)) {
            let done = self.0.lock().unwrap_or_else(PoisonError::into_inner).write(offset, *byte);
            if let Err(error) = done {
                tracing::debug!("a byte of the serial console is lost: {error:?}");
            }
        }
    }
}
