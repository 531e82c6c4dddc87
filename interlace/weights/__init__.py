"""Transfer of weights from trainer ranks to engine ranks: layouts, transfer plan, codecs and transports."""
