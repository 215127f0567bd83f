//! Implements the two legacy devices at I/O ports: the keyboard controller, which resets the VM, and the serial port. The
//! vCPUs' threads call them.

use super::bus::BusDevice;
use super::{Error, SerialSink};
use nacelle_base::guest_error;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::{Mutex, PoisonError};
use vm_superio::serial::NoEvents;
use vm_superio::{I8042Device, Serial, Trigger};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// The first port of the keyboard controller, which uses 0x60 and 0x64.
pub(super) const I8042: u64 = 0x60;
pub(super) const I8042_PORTS: u64 = 5;
/// The first port of the first serial port, and its interrupt.
pub(super) const COM1: u64 = 0x3f8;
pub(super) const COM1_PORTS: u64 = 8;
pub(super) const COM1_GSI: u32 = 4;

/// A trigger that calls a closure.
pub(super) struct CallbackTrigger<F>(F);

impl<F: Fn()> Trigger for CallbackTrigger<F> {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        (self.0)();
        Ok(())
    }
}

/// The keyboard controller. It has no keyboard; writing 0xfe to its command port calls `reset`.
pub(super) struct KeyboardController<F: Fn()>(Mutex<I8042Device<CallbackTrigger<F>>>);

impl<F: Fn()> KeyboardController<F> {
    pub fn new(reset: F) -> KeyboardController<F> {
        KeyboardController(Mutex::new(I8042Device::new(CallbackTrigger(reset))))
    }
}

impl<F: Fn() + Send> BusDevice for KeyboardController<F> {
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
                guest_error!("the keyboard controller cannot reset the VM: {error:?}");
            }
        }
    }
}

/// Passes the guest's serial output to the console.
pub(super) struct SerialOutput(SerialSink);

impl io::Write for SerialOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.0)(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An eventfd that raises an interrupt.
pub(super) struct IrqTrigger(EventFd);

impl Trigger for IrqTrigger {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// The serial port. It receives no input.
pub(super) struct SerialPort(Mutex<Serial<IrqTrigger, NoEvents, SerialOutput>>);

impl SerialPort {
    /// Returns the port and the eventfd of its interrupt.
    pub fn new(console: SerialSink) -> Result<(SerialPort, EventFd), Error> {
        let make = |source| Error::Create { what: "an interrupt for the serial port", source };
        let line = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(make)?;
        let ours = line.try_clone().map_err(make)?;
        Ok((SerialPort(Mutex::new(Serial::new(IrqTrigger(ours), SerialOutput(console)))), line))
    }

    /// Returns the registers as the driver wrote them.
    pub fn save(&self) -> SerialState {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner).state();
        SerialState {
            divisor: [state.baud_divisor_low, state.baud_divisor_high],
            line_control: state.line_control,
            interrupt_enable: state.interrupt_enable,
            modem_control: state.modem_control,
            scratch: state.scratch,
        }
    }

    /// Writes the registers as the driver did. A driver that waits to send more gets an interrupt.
    pub fn restore(&self, saved: &SerialState) {
        const LATCH: u8 = 1 << 7;
        let [low, high] = saved.divisor;
        let line = saved.line_control;
        let (interrupts, modem) = (saved.interrupt_enable, saved.modem_control);
        for (register, byte) in [
            (3, line | LATCH),
            (0, low),
            (1, high),
            (3, line & !LATCH),
            (1, interrupts),
            (4, modem),
            (7, saved.scratch),
            (3, line),
        ] {
            self.write(register, &[byte]);
        }
    }
}

/// The registers of a serial port that retain written values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialState {
    /// The divisor latch, low and high byte (DLL and DLM).
    pub divisor: [u8; 2],
    /// The line control register (LCR).
    pub line_control: u8,
    /// The interrupt enable register (IER).
    pub interrupt_enable: u8,
    /// The modem control register (MCR).
    pub modem_control: u8,
    /// The scratch register (SCR).
    pub scratch: u8,
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
                tracing::debug!("cannot write a byte to the serial port: {error:?}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restored_serial_port_has_its_old_registers() {
        let (one, _line) = SerialPort::new(Box::new(|_| ())).unwrap();
        for (register, byte) in [(3, 0x83), (0, 1), (1, 0), (3, 0x03), (1, 0x05), (4, 0x0b), (7, 0x5a)] {
            one.write(register, &[byte]);
        }
        let saved = one.save();
        let (two, line) = SerialPort::new(Box::new(|_| ())).unwrap();
        two.restore(&saved);
        assert_eq!(two.save(), saved);
        assert!(line.read().is_err(), "no driver waits to send");
        one.write(1, &[0x07]);
        two.restore(&one.save());
        assert_eq!(line.read().unwrap(), 1, "a driver that waits to send gets an interrupt");
    }
}
