L0:
(W)     send.ugm (1|M0)          r1       r2      null:0  0x0  0x0 // wr:1+0, rd:1; load.ugm.d32x16t.a32.ca.ca.bti[255]
L8:
(W)     send.ugm (1|M0)          r1       r2      null:0  0x0  0x0 // wr:1+0, rd:4; load.ugm.d32x64t.a64
        send.ugm (16|M0)         null     r2      r1:1  0x0  0x0 // wr:2+1, rd:0; store.ugm.d32.a64
        sync.nop                 null
        add (16|M0)              r1.0<1>:f     r1.0<1;1,0>:f    r2.0<1;1,0>:f
        add (32|M0)              r1.0<1>:f     r1.0<1;1,0>:f    r2.0<1;1,0>:f
        math.sqrt (16|M0)        r1.0<1>:f     r1.0<1;1,0>:f
(W&f0.0) jmpi                                L8
        mov (16|M0)              r1.0<1>:f     0:w
